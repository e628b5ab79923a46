"""The renderer of a policy: chat messages to tokens, and a response back to a message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollflow.storage.records import Prompt
from rollflow.tasks.policies.tokenizer import PolicyTokenizer


class PolicyRenderer:
    """Renders messages that follow a response: with the chat template, or as plain text.

    Only the new messages are tokenized. A rendered text begins with the template's end of the assistant's turn; if the
    response already ends with this token, the token is not repeated.
    """

    def __init__(self, tokenizer: PolicyTokenizer, chat_domains: Collection[str]) -> None:
        """Render with the chat template for prompts of `chat_domains`, and as plain text for other prompts."""
        self._tokenizer, self._chat_domains = tokenizer, frozenset(chat_domains)

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens of messages that follow `response`, up to the place where the policy answers them.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        if prompt.domain not in self._chat_domains:
            return self._tokenizer.encode_response("".join(message["content"] for message in messages))
        tokens = self._tokenizer.encode_response(self._tokenizer.template.render_after_answer(messages))
        return tokens[1:] if len(response) and list(tokens[:1]) == [response[-1]] else tokens

    def parse(self, tokens: Sequence[int]) -> Mapping[str, str]:
        """Return generated tokens as a message of the assistant, without the final stop token."""
        return {"role": "assistant", "content": self._tokenizer.decode_response(tokens)}
