"""What every source of questions guarantees, and how a question becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.tasks.prompts.config import JsonlPrompts

Reader = Callable[[JsonlPrompts], bytes]  # the content of a source's file


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt before it is tokens: its text, the right answer, and what the verifier needs."""

    text: str
    answer: str
    reference: Mapping[str, Any]


class QuestionSource(Protocol):
    """One `[[prompts]]` entry. All three streams are deterministic; the first two never hold a held-out text."""

    domain: str

    def training(self, position: int) -> Question:
        """The training question at `position`."""

    def demonstration(self, position: int) -> Question:
        """A question for supervised cold start, from another stream than training."""

    def held_out(self, count: int) -> list[Question]:
        """Up to `count` distinct questions for evaluation."""


class Encoder(Protocol):
    """Turns a question's text into prompt tokens (plain, or through the chat template)."""

    def __call__(self, text: str, chat: bool, system: str | None) -> Sequence[int]: ...
