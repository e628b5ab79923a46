"""The policy's tokenizer, read from its folder: plain text by `tokenizers`, chat templates by `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.stop import stop_tokens


class PolicyTokenizer:
    """Encodes questions and decodes responses. `folder` holds tokenizer.json and config.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = json.loads((folder / "config.json").read_text())

    def encode(self, text: str, chat: bool = False, system: str | None = None) -> Sequence[int]:
        """Prompt tokens of a question; with `chat` through the tokenizer's chat template."""
        if not chat:
            return list(self._fast.encode(text).ids)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        return list(self._chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of response tokens, without special tokens."""
        return str(self._fast.decode(list(tokens)))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The end-of-sequence ids."""
        return stop_tokens(self.folder)

    @property
    def context(self) -> int:
        """Longest prompt plus response, in tokens."""
        return int(self._config["max_position_embeddings"])

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        if not tokenizer.chat_template:
            raise ConfigError(
                "prompts.chat = True: the policy's tokenizer has no chat template; set prompts.chat = false"
            )
        return tokenizer
