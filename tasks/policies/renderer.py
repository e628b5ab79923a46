"""Converts chat messages to tokens of a policy, and the tokens of a response to a chat message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollflow.storage.records import Prompt
from rollflow.tasks.policies.tokenizer import PolicyTokenizer


class PolicyRenderer:
    """Renders the messages that follow a response, with the chat template or as plain text.

    Only the new messages are tokenized; the tokens of the earlier response stay as the policy generated them. An end
    token that the chat template writes between response and messages is not repeated if the response already ends with
    it.
    """

    def __init__(self, tokenizer: PolicyTokenizer, chat_domains: Collection[str]) -> None:
        """Use the chat template for prompts whose domain is in `chat_domains`, and plain text for other prompts."""
        self._tokenizer, self._chat_domains = tokenizer, frozenset(chat_domains)

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens of `messages`, to append to the tokens `response` before the policy answers again.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        if prompt.domain not in self._chat_domains:
            return self._tokenizer.encode_response("".join(message["content"] for message in messages))
        tokens = self._tokenizer.encode_response(self._tokenizer.template.render_after_answer(messages))
        return tokens[1:] if len(response) and list(tokens[:1]) == [response[-1]] else tokens

    def parse(self, tokens: Sequence[int]) -> Mapping[str, str]:
        """Convert generated tokens into a chat message of the assistant, without the final stop token."""
        return {"role": "assistant", "content": self._tokenizer.decode_response(tokens)}
