"""Which questions a run holds out.

No question that any source of a run holds out is trained on or demonstrated, whatever source asks it and in whatever
form: its key and its normalised text are compared.
"""

from __future__ import annotations

from typing import Literal

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.keys import normalised

Split = Literal["text", "key"]  # what is compared; "text" in runs that were recorded before questions had keys


class HeldOut:
    """The questions that are held out. All sources of a run share one.

    With the split "text" each source has one of its own, and the texts are compared as they are.
    """

    def __init__(self, split: Split = "key") -> None:
        self.split = split
        self._keys: set[str] = set()

    def identity(self, question: Question) -> str:
        """What a source holds out once."""
        return question.text if self.split == "text" else question.canonical_key

    def add(self, question: Question) -> None:
        """Hold a question out."""
        self._keys.update(self._keys_of(question))

    def __contains__(self, question: Question) -> bool:
        return not self._keys.isdisjoint(self._keys_of(question))

    def _keys_of(self, question: Question) -> tuple[str, ...]:
        return (question.text,) if self.split == "text" else (question.canonical_key, normalised(question.text))
