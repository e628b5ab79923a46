"""The messages of a conversation that follow the prompt, as an episode extends it turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollflow.storage.records import Prompt
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.environments.long_text import compute_apart
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

    def extend(
        self, renderer: Renderer, prompt: Prompt, response: Int32s, messages: Sequence[Message]
    ) -> tuple[Conversation, Extension]:
        """Return the conversation with the newest answer, and how an episode with this response continues if `messages`
        follow.

        Raises:
            ValueError: the policy has not answered yet.
        """
        if len(response) == self.begun:
            raise ValueError("the policy has not answered yet; call extend after `generate` has returned a generation")
        recent = (*self.recent, renderer.parse(response[self.begun :]))
        talk = Conversation(self.earlier, recent, len(response), self.is_known)
        found = renderer.rewrite(prompt, self.earlier, recent, messages) if self.is_known else None
        if found is None:
            return talk, Extension(renderer.render(prompt, response, messages), branches=False)
        return talk, Extension(found, branches=True)

    async def extend_apart(
        self, renderer: Renderer, prompt: Prompt, response: Int32s, messages: Sequence[Message]
    ) -> tuple[Conversation, Extension]:
        """Do the same as `extend`, in a thread if the messages are long."""
        texts = (message["content"] for message in messages)
        return await compute_apart(texts, self.extend, renderer, prompt, response, messages)

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
