"""What every source of questions guarantees, and how a question becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.tasks.prompts.config import JsonlPrompts
from rollflow.tasks.prompts.keys import normalise

Reader = Callable[[JsonlPrompts], bytes]  # the content of a source's file


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt before it is tokens: its text, the right answer, and what the verifier needs (as JSON can say it).

    Questions with one `key` are the same question in several forms. Without a key, the normalised text stands in.
    """

    text: str
    answer: str
    reference: Mapping[str, Any]
    key: str = ""

    @property
    def canonical_key(self) -> str:
        """The key, or the normalised text."""
        return self.key or normalise(self.text)


class QuestionSource(Protocol):
    """One `[[prompts]]` entry: a function of its config and the run's seed alone, in any process, on any machine.

    A position may be asked for at any time and in any order. No training question and no demonstration has a held-out
    key.
    """

    def training(self, position: int) -> Question:
        """The training question at `position`."""

    def demonstration(self, position: int) -> Question:
        """A question for supervised cold start, from another stream than training."""

    def held_out(self, count: int) -> list[Question]:
        """Return up to `count` questions of distinct keys for evaluation: the first of those that are held out."""


class Encoder(Protocol):
    """Turns a question's text into prompt tokens (plain, or through the chat template)."""

    def __call__(self, text: str, chat: bool, system: str | None) -> Sequence[int]: ...
