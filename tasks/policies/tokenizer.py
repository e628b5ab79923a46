"""The policy's tokenizer, read from its folder: plain text by `tokenizers`, chat templates by `transformers`.

Other tools open the folder with `AutoTokenizer`. For some model types it builds a tokenizer that is not the one in
`tokenizer.json`. `other_reading` finds that out; a policy on which the two differ is neither trained nor exported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.stop import stop_tokens

# What tokenizers treat differently, alone and beside each other: letters, digits, blanks, signs, marks, scripts.
PIECES = ("a", "Zz", "7", "\u0663", "\u00bd", " ", "  ", "\n", "\t", ".", "'s", "e\u0301", "\u65e5", "\U0001f642")


class PolicyTokenizer:
    """Encodes questions and decodes responses. `folder` holds tokenizer.json and config.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fast = _whole(folder)
        self._config = json.loads((folder / "config.json").read_text())

    def encode(self, text: str, chat: bool = False, system: str | None = None) -> Sequence[int]:
        """Prompt tokens of a question; with `chat` through the tokenizer's chat template."""
        if not chat:
            return list(self._fast.encode(text).ids)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        return list(self._chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def encode_response(self, text: str) -> Sequence[int]:
        """Tokens of a response that says `text`, as the tokenizer cuts it."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with every special token among them."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=False))

    def decode_response(self, tokens: Sequence[int], special: bool = True) -> str:
        """Text of a response as its verifier reads it: special tokens are in it, but for the stop token at its end.

        Without `special` no special token is in it.
        """
        if not special:
            return str(self._fast.decode(list(tokens)))
        ended = bool(len(tokens)) and tokens[-1] in self.stop_tokens
        return self.decode(tokens[:-1] if ended else tokens)

    @cached_property
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


def _whole(folder: Path) -> Tokenizer:
    """The tokenizer.json without its truncation and padding settings, which other tools ignore."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def other_reading(folder: Path, texts: Iterable[str] = ()) -> str | None:
    """How `AutoTokenizer` reads the folder differently from a run; None if it reads the same.

    It compares the vocabularies, and the tokens and texts of `texts`, of every special token and of `PIECES`.
    """
    from transformers import AutoTokenizer

    ours = _whole(folder)
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        return f"AutoTokenizer cannot open it ({str(error).strip().splitlines()[0]})"
    special = [f"a{token.content} b" for token in ours.get_added_tokens_decoder().values()]
    for text in (*texts, *special, *map("".join, product(PIECES, repeat=3))):
        mine, found = list(ours.encode(text).ids), list(theirs.encode(text))
        if found != mine:
            return f"of {text!r} AutoTokenizer makes the tokens {found}, its tokenizer.json {mine}"
        skips = (True, False)
        plain = [theirs.decode(mine, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in skips]
        if plain != [ours.decode(mine, skip_special_tokens=skip) for skip in skips]:
            return f"the tokens {mine} are another text to AutoTokenizer than by its tokenizer.json"
    same = theirs.get_vocab() == ours.get_vocab()
    return None if same else "AutoTokenizer gives it another vocabulary than its tokenizer.json"
