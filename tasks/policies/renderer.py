"""Converts chat messages to a policy's tokens, and a response back to a message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollflow.storage.records import Prompt
from rollflow.tasks.policies.tokenizer import PolicyTokenizer


class PolicyRenderer:
    """Renders the messages that follow a response, with the chat template or as plain text.

    Only the new messages are tokenized, not the response before them. If the response already ends with the end token
    that the template puts before the messages, the token is not repeated.
    """

    def __init__(self, tokenizer: PolicyTokenizer, chat_domains: Collection[str]) -> None:
        """Render with the chat template for prompts of `chat_domains`, and as plain text for other prompts."""
        self._tokenizer, self._chat_domains = tokenizer, frozenset(chat_domains)

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens to append to `response` so that the messages follow and the policy can answer.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        if prompt.domain not in self._chat_domains:
            return self._tokenizer.encode_response("".join(message["content"] for message in messages))
        tokens = self._tokenizer.encode_response(self._tokenizer.template.render_after_answer(messages))
        return tokens[1:] if len(response) and list(tokens[:1]) == [response[-1]] else tokens

    def parse(self, tokens: Sequence[int]) -> Mapping[str, str]:
        """Convert generated tokens into a message of the assistant, without the final stop token."""
        return {"role": "assistant", "content": self._tokenizer.decode_response(tokens)}
