"""Converts chat messages to tokens of a policy, and the tokens of a response to a chat message."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rollflow.storage.records import Prompt
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.policies.tokens.control_text import CUT

CONTENT = "{}"  # marks where the content is inserted into the frame of a message


class PolicyRenderer:
    """Renders the messages that follow a response, with the chat template or as plain text.

    Only new messages are tokenized; the tokens of earlier responses stay unchanged. The chat template's end token is
    not repeated if the response already ends with it. If a message, a tool's schema or an observation contains the text
    of a control token, the text is not encoded as this token (see `control_text`).
    """

    def __init__(self, tokenizer: PolicyTokenizer, chat_domains: Collection[str]) -> None:
        """Use the chat template for prompts whose domain is in `chat_domains`, and plain text for other prompts."""
        self._tokenizer, self._chat_domains = tokenizer, frozenset(chat_domains)

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens of `messages`, to be appended to the tokens `response`.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        if not self.is_chat(prompt):
            return self._encode(self._write_plain(messages))
        tokens = self._encode(self._tokenizer.template.render_after_answer(self._cut_messages(messages)))
        return tokens[1:] if len(response) and list(tokens[:1]) == [response[-1]] else tokens

    def render_opening(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], text: str) -> Sequence[int]:
        """Return the tokens of a prompt with a text added to its last user message, and with the schemas of tools.

        Without a chat template that writes tools, the tools are described in plain text.

        Raises:
            ConfigError: the chat template rejects the tools.
        """
        cut = self._tokenizer.cut_control
        added = cut(text)
        if not self.is_chat(prompt):
            return [*prompt.input.flat, *self._encode((describe_tools(tools, cut) if tools else "") + added)]
        *before, last = prompt.messages
        template = self._tokenizer.template
        if tools and not template.writes_tools(prompt.messages, tools):
            added, tools = describe_tools(tools, cut) + added, ()
        messages = [*before, {**last, "content": last["content"] + added}]
        marked = cut_values(list(tools), cut)
        if CUT not in added and marked == list(tools):
            return template.encode(messages, None, tools)
        return self._encode(template.render_messages(messages, marked))

    def is_chat(self, prompt: Prompt) -> bool:
        """Return whether the chat template renders the prompt and the messages after it."""
        return prompt.domain in self._chat_domains

    def rewrite(
        self,
        prompt: Prompt,
        earlier: Sequence[Mapping[str, str]],
        recent: Sequence[Mapping[str, str]],
        messages: Sequence[Mapping[str, str]],
    ) -> Sequence[int] | None:
        """Return the new tokens of the conversation after the prompt, if the chat template changes a recent answer
        because of `messages`. The result is None if all recent answers stay unchanged.

        `earlier` and `recent` are the messages after the prompt. Answers among the `earlier` messages were already
        changed by the chat template.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        if not self.is_chat(prompt):
            return None
        template = self._tokenizer.template
        answers = [message["content"] for message in recent if message["role"] == "assistant"]
        thinks = any("</think>" in answer for answer in answers)
        if template.keeps_answer(tuple(message["role"] for message in messages), thinks=thinks):
            return None
        before = template.render_messages(prompt.messages)
        spoken = [self._drop_end(message) for message in (*earlier, *recent)]
        later = [*self._cut_messages(spoken, answers=True), *self._cut_messages(messages)]
        whole = template.render_messages([*prompt.messages, *later])
        # Nothing is rewritten if the template has begun a thought in the prompt, because the prompt cannot be changed.
        return self._encode(whole[len(before) :]) if whole.startswith(before) else None

    def _drop_end(self, message: Mapping[str, str]) -> Mapping[str, str]:
        """Return an answer without the end-of-turn token, which the chat template writes itself."""
        end = self._tokenizer.turn_end
        if end is None or message["role"] != "assistant":
            return message
        return {**message, "content": message["content"].removesuffix(self._tokenizer.decode([end]))}

    def _cut_messages(self, messages: Sequence[Mapping[str, str]], *, answers: bool = False) -> list[Mapping[str, str]]:
        """Return messages in which marks split the text of each control token. With `answers`, messages of the
        assistant stay unchanged, because the policy's answers may contain control tokens.
        """
        cut = self._tokenizer.cut_message
        keeps = [answers and one["role"] == "assistant" for one in messages]
        contents = [one["content"] if kept else cut(one["content"]) for one, kept in zip(messages, keeps, strict=True)]
        return [
            {**{key: value for key, value in one.items() if key != "frame"}, "content": content}
            for one, content in zip(messages, contents, strict=True)
        ]

    def _write_plain(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return messages as plain text, in which marks split the text of each control token."""
        if not any("frame" in one for one in messages):
            return self._tokenizer.cut_control("".join(one["content"] for one in messages))
        cut = self._tokenizer.cut_message
        framed = [(one.get("frame", CONTENT).partition(CONTENT), cut(one["content"])) for one in messages]
        return "".join(before + content + after for (before, _, after), content in framed)

    def _encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text; the pieces between marks are tokenized separately."""
        return [token for piece in text.split(CUT) for token in self._tokenizer.encode_response(piece)]

    def parse(self, tokens: Sequence[int]) -> Mapping[str, str]:
        """Convert generated tokens into a chat message of the assistant, without the final stop token."""
        return {"role": "assistant", "content": self._tokenizer.decode_response(tokens)}


def describe_tools(tools: Sequence[Mapping[str, Any]], cut: Callable[[str], str] = str) -> str:
    """Return a text that describes tools to a policy whose chat template does not describe them. The function `cut` is
    applied to the schemas.
    """
    listed = cut("\n".join(json.dumps(tool["function"]) for tool in tools))
    call = '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>'
    return f"\nTools:\n{listed}\nTo call a tool, write {call}\n"


def cut_values(value: Any, cut: Callable[[str], str]) -> Any:
    """Return a JSON value after applying `cut` to all its strings and names."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, Mapping):
        return {cut(name): cut_values(one, cut) for name, one in value.items()}
    return [cut_values(one, cut) for one in value] if isinstance(value, list | tuple) else value
