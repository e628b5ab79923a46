"""Stores the held-out questions of a run, which are asked in evaluations and never in training.

A question that one source holds out is neither trained on nor demonstrated by any source. Two questions are the same
question if their keys or their normalised texts are equal.
"""

from __future__ import annotations

from typing import Literal

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.keys import normalise_text

# the attribute by which questions are compared with held-out questions; older runs use "text"
Split = Literal["text", "key"]


class HeldOut:
    """A set of held-out questions, shared by all sources of a run.

    In older runs (split "text"), each source has its own set, and exact texts are compared.
    """

    def __init__(self, split: Split = "key") -> None:
        self.split = split
        self._keys: set[str] = set()
        self.questions: list[Question] = []  # all held-out questions

    def identity(self, question: Question) -> str:
        """Return the text or key that identifies a question among the held-out questions."""
        return question.text if self.split == "text" else question.canonical_key

    def add(self, question: Question) -> None:
        """Add a question to the held-out questions."""
        self._keys.update(self._keys_of(question))
        self.questions.append(question)

    def __contains__(self, question: Question) -> bool:
        return not self._keys.isdisjoint(self._keys_of(question))

    def _keys_of(self, question: Question) -> tuple[str, ...]:
        return (question.text,) if self.split == "text" else (question.canonical_key, normalise_text(question.text))
