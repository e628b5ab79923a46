"""Which questions a run holds out.

No source of a run trains on, or demonstrates, a question that any of its sources holds out, in whatever form: both the
key and the normalised text are compared.
"""

from __future__ import annotations

from typing import Literal

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.keys import normalise

Split = Literal["text", "key"]  # what is compared; "text" in older runs, whose questions had no keys


class HeldOut:
    """The questions that are held out. All sources of a run share one.

    With the split "text" each source has its own set, and the texts are compared as they are.
    """

    def __init__(self, split: Split = "key") -> None:
        self.split = split
        self._keys: set[str] = set()

    def identity(self, question: Question) -> str:
        """Return what must be distinct among the held-out questions of a source."""
        return question.text if self.split == "text" else question.canonical_key

    def add(self, question: Question) -> None:
        """Hold a question out."""
        self._keys.update(self._keys_of(question))

    def __contains__(self, question: Question) -> bool:
        return not self._keys.isdisjoint(self._keys_of(question))

    def _keys_of(self, question: Question) -> tuple[str, ...]:
        return (question.text,) if self.split == "text" else (question.canonical_key, normalise(question.text))
