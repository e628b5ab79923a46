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
    """A prompt before it is tokenized: its text, the right answer, and what the verifier needs (as JSON).

    Questions with the same `key` are the same question in several forms. Without a key, the normalised text is the key.
    """

    text: str
    answer: str
    reference: Mapping[str, Any]
    key: str = ""

    @property
    def canonical_key(self) -> str:
        """The key, or else the normalised text."""
        return self.key or normalise_text(self.text)


class QuestionSource(Protocol):
    """One `[[prompts]]` entry: a pure function of its config and the run's seed, in any process, on any machine.

    Any position may be asked for at any time and in any order. No training question and no demonstration has the key of
    a held-out question.
    """

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""

    def demonstration(self, position: int) -> Question:
        """Return a question for supervised cold start, from a different stream than training."""

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions for evaluation, or fewer; their keys are distinct."""


class Encoder(Protocol):
    """Turns a question's text into prompt tokens (plain, or through the chat template)."""

    def __call__(self, text: str, chat: bool, system: str | None) -> Sequence[int]: ...
