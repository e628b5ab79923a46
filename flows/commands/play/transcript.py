"""Records an episode in a form that people can read: who said what, instead of tokens. Rendered chat messages are shown
without the marks of the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.model_input import NO_TOKEN
from rollflow.storage.records import Prompt
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.environments.ports import Message, Renderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer

USER = "user"


class NotedRenderer(Renderer):
    """Renders messages with `renderer`, and remembers which messages the returned tokens stand for."""

    def __init__(self, renderer: Renderer) -> None:
        """Wrap a renderer of one episode."""
        self._renderer = renderer
        self._rendered = dict[tuple[int, ...], Sequence[Message]]()

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        """Return the tokens of the messages."""
        tokens = self._renderer.render(prompt, response, messages)
        self._rendered[tuple(tokens)] = tuple(messages)
        return tokens

    def render_opening(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], text: str) -> Sequence[int]:
        """Return the tokens of the prompt with the tools' schemas."""
        return self._renderer.render_opening(prompt, tools, text)

    def is_chat(self, prompt: Prompt) -> bool:
        """Return whether the prompt is rendered with the chat template."""
        return self._renderer.is_chat(prompt)

    def rewrite(
        self, prompt: Prompt, earlier: Sequence[Message], recent: Sequence[Message], messages: Sequence[Message]
    ) -> Sequence[int] | None:
        """Return the tokens of the whole conversation if the chat template changes an answer, and remember the
        conversation.
        """
        tokens = self._renderer.rewrite(prompt, earlier, recent, messages)
        if tokens is not None:
            self._rendered[tuple(tokens)] = (*earlier, *recent, *messages)
        return tokens

    def parse(self, tokens: Sequence[int]) -> Message:
        """Convert generated tokens into a message."""
        return self._renderer.parse(tokens)

    def find(self, tokens: Sequence[int]) -> Sequence[Message] | None:
        """Return the messages that were rendered as exactly these tokens, or None."""
        return self._rendered.get(tuple(tokens))


@dataclass
class Transcript:
    """The conversation of an episode so far. `messages` has the whole context as chat messages: the prompt, the
    answers, and what the environment wrote.
    """

    prompt: Prompt
    tokenizer: PolicyTokenizer
    renderer: NotedRenderer
    messages: list[Mapping[str, str]] = field(default_factory=list)
    is_rewritten: bool = False  # True if the environment rewrote the context before the newest turn
    _known: Int32s = field(default_factory=Int32s)  # the part of the context that was noted so far

    def __post_init__(self) -> None:
        """Begin the conversation with the prompt."""
        self._begin()

    def _begin(self) -> None:
        self.messages = list(self.prompt.messages) or [{"role": USER, "content": self.prompt.text}]
        self._known = self.prompt.input.flat

    def read_context(self, context: Int32s) -> Sequence[Mapping[str, str]]:
        """Return the messages by which the environment has continued the context since the last call, and note them."""
        self.is_rewritten = context[: len(self._known)] != self._known
        if self.is_rewritten:
            self._begin()
            if context[: len(self._known)] != self._known:  # the environment has replaced the prompt
                self.messages, self._known = [], Int32s()
        new = context[len(self._known) :]
        self._known = context
        found = self._read_messages(new)
        self.messages += found
        return found

    def _read_messages(self, tokens: Int32s) -> Sequence[Mapping[str, str]]:
        if not len(tokens):
            return ()
        if (rendered := self.renderer.find(tokens)) is not None:
            return rendered
        own = [token for token in tokens if token != NO_TOKEN]
        return ({"role": USER, "content": self.tokenizer.decode_response(own, special=False)},)

    def note_answer(self, tokens: Int32s) -> str:
        """Note the answer of a player, and return its text."""
        self._known = self._known + tokens
        text = self.tokenizer.decode_response(tokens, special=False)
        self.messages.append({"role": "assistant", "content": text})
        return text
