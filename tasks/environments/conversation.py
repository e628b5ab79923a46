"""Stores the chat messages of an episode after its prompt, and finds the tokens with which the episode continues."""

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
    """The tokens with which an episode continues; if `branches` is true, they begin a new branch."""

    tokens: Sequence[int]
    branches: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages after the prompt up to the newest answer. `is_known` is false if the environment wrote the context
    as tokens; then the messages are unknown.
    """

    earlier: tuple[Message, ...] = ()  # messages that the chat template has rewritten in the context
    recent: tuple[Message, ...] = ()  # later messages, whose answers are unchanged since they were generated
    begun: int = 0  # position in the response at which the newest answer begins
    is_known: bool = True

    def extend(
        self, renderer: Renderer, prompt: Prompt, response: Int32s, messages: Sequence[Message]
    ) -> tuple[Conversation, Extension]:
        """Return the conversation with the policy's newest answer added, and the tokens that continue the episode with
        `messages`.

        Raises:
            ValueError: the policy has not answered yet.
        """
        if len(response) == self.begun:
            raise ValueError(
                "extend needs an answer of the policy, but the policy has not answered yet; call `generate` first"
            )
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
        """Return the conversation with `messages` added; the response then has `length` tokens."""
        if branches:
            return Conversation((*self.earlier, *self.recent, *messages), (), length, self.is_known)
        return Conversation(self.earlier, (*self.recent, *messages), length, self.is_known)


BEGUN = Conversation()


class RoleContext(NamedTuple):
    """The context of a role in an episode, without its branches: prompt, largest length of a response, and messages."""

    prompt: Prompt
    longest: int
    talk: Conversation = BEGUN
