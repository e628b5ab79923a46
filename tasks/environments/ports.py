"""Defines the services that a run provides to an environment: tokenizer, renderer, tools, endpoints and clock.

    tokenizer   text to tokens and back
    renderer    chat messages to tokens, and a response back to a message
    tools       the functions of `[environment.tools]`, by name
    endpoints   the language models of `[environment.endpoints]`, by name
    clock       seconds, on the event loop's clock; an environment sleeps with `asyncio.sleep`

All episodes share the same services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Prompt
from rollflow.tasks.environments.endpoints import NO_ENDPOINTS, EndpointRoles
from rollflow.tasks.environments.limits import NO_LIMITS, EpisodeLimits
from rollflow.tasks.environments.tools import Toolbox

# chat message with `role` and `content`; `frame` is the text around the content for a policy without chat template
Message = Mapping[str, str]


class Tokenizer(Protocol):
    """Converts text to tokens of the policy, and tokens to text."""

    def encode_response(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without adding special tokens at its beginning or end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text, including special tokens."""

    def decode_response(self, tokens: Sequence[int]) -> str:
        """Decode a response to the text that a scorer reads, without a stop token at the end."""


class Renderer(Protocol):
    """Converts chat messages to tokens and back, with the policy's chat template or as plain text."""

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        """Return the tokens to append to `response`, so that the messages follow and the policy can answer.

        The prompt and `response` are not tokenized again, so sampled tokens stay unchanged. The text of a control token
        in a message becomes ordinary tokens.

        Raises:
            ConfigError: the policy's chat template rejects the messages.
        """

    def render_opening(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], text: str) -> Sequence[int]:
        """Return the tokens of a prompt with a text added to its last user message, and with the schemas of tools.

        Raises:
            ConfigError: the policy's chat template rejects the tools.
        """

    def is_chat(self, prompt: Prompt) -> bool:
        """Return whether the chat template renders the prompt and the messages after it."""

    def rewrite(
        self, prompt: Prompt, earlier: Sequence[Message], recent: Sequence[Message], messages: Sequence[Message]
    ) -> Sequence[int] | None:
        """Return the new tokens of the conversation after the prompt, if the chat template changes a recent answer
        because of `messages`. The result is None if all recent answers stay unchanged.

        `earlier` and `recent` are the messages after the prompt. Answers among the `earlier` messages were already
        changed by the chat template.

        Raises:
            ConfigError: the policy's chat template rejects the messages.
        """

    def parse(self, tokens: Sequence[int]) -> Message:
        """Convert tokens that the policy generated into a message of the assistant."""


class _NoText:
    """Replaces tokenizer and renderer in a run without a policy folder; every method raises `ConfigError`."""

    def encode_response(self, text: str) -> Sequence[int]:
        _refuse()

    def decode(self, tokens: Sequence[int]) -> str:
        _refuse()

    def decode_response(self, tokens: Sequence[int]) -> str:
        _refuse()

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        _refuse()

    def render_opening(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], text: str) -> Sequence[int]:
        _refuse()

    def is_chat(self, prompt: Prompt) -> bool:
        _refuse()

    def rewrite(
        self, prompt: Prompt, earlier: Sequence[Message], recent: Sequence[Message], messages: Sequence[Message]
    ) -> Sequence[int] | None:
        _refuse()

    def parse(self, tokens: Sequence[int]) -> Message:
        _refuse()


NO_TEXT = _NoText()


def _refuse() -> NoReturn:
    raise ConfigError(
        "environment: this environment needs a tokenizer, but a run without a policy has none; give the run a policy"
    )


def _read_clock() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class EnvironmentPorts:
    """The services of a run for its environment: tokenizer, renderer, tools and clock."""

    tokenizer: Tokenizer = NO_TEXT
    renderer: Renderer = NO_TEXT
    tools: Toolbox = field(default_factory=Toolbox)
    clock: Callable[[], float] = _read_clock
    endpoints: EndpointRoles = NO_ENDPOINTS
    limits: EpisodeLimits = NO_LIMITS


NO_PORTS = EnvironmentPorts()
