"""Defines the interfaces of question sources, and of the function that converts a question to tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.tasks.prompts.config import FileBase
from rollflow.tasks.prompts.keys import normalise_text

Message = Mapping[str, str]  # a chat message, with `role` and `content`
Asked = str | Sequence[Message]  # a question: a text, or chat messages
Reader = Callable[[FileBase], bytes]  # returns the content of a question source's prompt file, as JSON lines


@dataclass(frozen=True, slots=True)
class DemonstratedTurn:
    """One turn of a demonstrated episode: the policy's text, and the messages that the environment adds.

    If `ends` is True, the turn ends with the stop token; otherwise, it ends at a token limit or at a stop string.
    """

    said: str
    replies: Sequence[Message] = ()
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A question as text or chat messages, with the right answer and the JSON reference that a verifier reads.

    Questions with the same `key` count as the same question, even if their texts differ. Without a `key`, the
    normalised text is the key. If a question has `messages`, the policy reads them, and `text` is only shown to people.

    The cold start demonstrates a question by its `turns`, or by its `answer` if it has no turns.
    """

    text: str
    answer: str
    reference: Mapping[str, Any]
    key: str = ""
    messages: Sequence[Message] = ()
    turns: Sequence[DemonstratedTurn] = ()

    @property
    def asked(self) -> Asked:
        """The input of the policy: `messages`, or `text` if the question has no messages."""
        return self.messages or self.text

    @property
    def canonical_key(self) -> str:
        """The question's `key` or, if it has none, its normalised text."""
        return self.key or normalise_text(self.text)


class QuestionSource(Protocol):
    """The questions of one `[[prompts]]` section, which depend only on the section and the run's seed.

    Questions may be requested by position, at any time and in any order. No training question and no demonstration has
    the same key as a held-out question.
    """

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position` in the supervised cold start."""

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions, with distinct keys, or fewer if there are no more."""


class Encoder(Protocol):
    """Converts a question's text or messages to prompt tokens, with or without the chat template."""

    def __call__(self, asked: Asked, chat: bool, system: str | None) -> Sequence[int]: ...
