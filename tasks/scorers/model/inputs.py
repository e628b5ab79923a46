"""Converts a prompt and a response to the input of a reward model.

With a chat template, the input is the rendered conversation, with the response as the assistant's message. Without a
chat template, the input is a pair of texts: prompt and response. The text of a special token in a response becomes
ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollflow.storage.errors import ConfigError

Conversation = tuple[Sequence[Mapping[str, str]], str]  # a prompt's chat messages, and the response
# text that no prompt contains; it replaces the response while the chat template is rendered
MARK = "[7f3a: the response stands here]"
UNLIMITED = 10**9  # a larger limit in a tokenizer's config means that there is no limit


class GraderInput(NamedTuple):
    """The input of a reward model: named lists of numbers of equal length, such as `input_ids`, and the number of cut
    tokens.
    """

    columns: dict[str, list[int]]
    cut: int

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.columns["input_ids"])


class InputWriter:
    """Converts conversations to inputs of a reward model."""

    def __init__(self, folder: Path, longest: int | None, cut: Literal["start", "end"], now: float = 0.0) -> None:
        """Open the tokenizer in `folder`.

        Args:
            longest: The largest number of tokens of an input; None means no limit.
            cut: The end of the input at which tokens are cut off if the input is longer.
            now: The time that the chat template reads, in seconds since the Unix epoch.
        """
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.longest, self._cut = longest, cut
        self._moment = datetime.fromtimestamp(now, UTC)
        self._segments = "token_type_ids" in self._tokenizer.model_input_names

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of an input that the tokenizer's config allows, or None."""
        found = self._tokenizer.model_max_length
        return int(found) if found < UNLIMITED else None

    @property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return int(max(self._tokenizer.get_vocab().values()))

    def write(self, conversation: Conversation) -> GraderInput:
        """Convert a prompt and a response to an input.

        Raises:
            ConfigError: the chat template rejects the prompt or omits the response.
        """
        messages, response = conversation
        if self._tokenizer.chat_template and messages:
            return self._write_chat(messages, response)
        prompt = "\n".join(message["content"] for message in messages)
        return self._write_pair([prompt, response] if prompt else [response])

    def _write_chat(self, messages: Sequence[Mapping[str, str]], response: str) -> GraderInput:
        answer = {"role": "assistant", "content": MARK}
        try:
            rendered = self._tokenizer.apply_chat_template(
                [*map(dict, messages), answer], tokenize=False, strftime_now=self._moment.strftime
            )
        except Exception as error:  # noqa: BLE001 - a template is code of the folder's author
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"the chat template of the reward model fails ({said})") from None
        before, found, after = rendered.rpartition(MARK)
        if not found:
            raise ConfigError(
                "the chat template of the reward model leaves the answer of the policy out of the text that is scored"
            )
        tokens = [*self._encode(before), *self._encode(response, split=True), *self._encode(after)]
        cut = max(0, len(tokens) - (self.longest or len(tokens)))
        kept = tokens[cut:] if self._cut == "start" else tokens[: len(tokens) - cut]
        return self._with_segments({"input_ids": kept}, cut)

    def _encode(self, text: str, *, split: bool = False) -> list[int]:
        """Return the tokens of a text; with `split`, the text of a special token becomes ordinary tokens."""
        found = self._tokenizer(text, add_special_tokens=False, split_special_tokens=split, verbose=False)
        return list(found["input_ids"])

    def _write_pair(self, texts: Sequence[str]) -> GraderInput:
        keys: dict[str, Any] = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
        found = self._tokenizer(*texts, **keys)
        count = len(found["input_ids"])
        if self.longest and count > self.longest:
            self._tokenizer.truncation_side = "left" if self._cut == "start" else "right"
            found = self._tokenizer(*texts, truncation=True, max_length=self.longest, **keys)
        cut = count - len(found["input_ids"])
        return self._with_segments({name: list(column) for name, column in found.items()}, cut)

    def _with_segments(self, columns: dict[str, list[int]], cut: int) -> GraderInput:
        tokens = columns["input_ids"] or [0]  # the model needs at least one token
        found = {"input_ids": tokens}
        if self._segments:
            found["token_type_ids"] = columns.get("token_type_ids") or [0] * len(tokens)
        return GraderInput(found, cut)
