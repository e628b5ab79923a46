"""The contract of question sources, and the interface that turns a question into tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.tasks.prompts.config import JsonlPrompts
from rollflow.tasks.prompts.keys import normalise_text

Reader = Callable[[JsonlPrompts], bytes]  # returns the content of a source's file


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt before it is tokenized: its text, the right answer, and the reference for the verifier (as JSON).

    Two questions with the same `key` are the same question in two forms. A question without a key has its normalised
    text as its key.
    """

    text: str
    answer: str
    reference: Mapping[str, Any]
    key: str = ""

    @property
    def canonical_key(self) -> str:
        """The question's key; the normalised text of a question without a key."""
        return self.key or normalise_text(self.text)


class QuestionSource(Protocol):
    """The questions of one `[[prompts]]` entry: a pure function of the entry and the run's seed, on any machine.

    A caller may ask for any position at any time and in any order. No training question and no demonstration has the
    key of a held-out question.
    """

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""

    def demonstration(self, position: int) -> Question:
        """Return a question for supervised cold start, from a different stream than the training questions."""

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions for evaluation, or fewer; the keys are distinct."""


class Encoder(Protocol):
    """Turns a question's text into prompt tokens, with or without the chat template."""

    def __call__(self, text: str, chat: bool, system: str | None) -> Sequence[int]: ...
