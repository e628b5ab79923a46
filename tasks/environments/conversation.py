"""The messages of a conversation that follow the prompt, as an episode extends it turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollflow.storage.records import Prompt
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.environments.ports import Message, Renderer


@dataclass(frozen=True, slots=True)
class Extension:
    """How an episode continues: tokens to append, or the tokens of a new branch."""

    tokens: Sequence[int]
    branches: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages after the prompt up to the newest answer. If `is_known` is false, the environment wrote its own
    context, and the messages in it are not known.
    """

    earlier: tuple[Message, ...] = ()  # messages that stand in the context as the chat template has rewritten them
    recent: tuple[Message, ...] = ()  # messages whose answers stand in the context as they were generated
    begun: int = 0  # position in the response at which the newest answer begins
    is_known: bool = True

    def add_answer(self, renderer: Renderer, response: Int32s) -> Conversation:
        """Return the conversation with the newest answer."""
        answer = renderer.parse(response[self.begun :])
        return Conversation(self.earlier, (*self.recent, answer), len(response), self.is_known)

    def extend(self, renderer: Renderer, prompt: Prompt, response: Int32s, messages: Sequence[Message]) -> Extension:
        """Return how an episode with this response continues if `messages` follow."""
        found = renderer.rewrite(prompt, self.earlier, self.recent, messages) if self.is_known else None
        if found is None:
            return Extension(renderer.render(prompt, response, messages), branches=False)
        return Extension(found, branches=True)

    def add_messages(self, messages: Sequence[Message], length: int, *, branches: bool) -> Conversation:
        """Return the conversation with messages, after which the response has `length` tokens."""
        if branches:
            return Conversation((*self.earlier, *self.recent, *messages), (), length, self.is_known)
        return Conversation(self.earlier, (*self.recent, *messages), length, self.is_known)


BEGUN = Conversation()


class RoleContext(NamedTuple):
    """What a role of an episode has besides its branches: its prompt, the length of its response, its messages."""

    prompt: Prompt
    longest: int
    talk: Conversation = BEGUN
