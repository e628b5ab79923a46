"""The tokenizer of a policy, which uses the library `tokenizers` for text, and `transformers` for chat templates.

Other tools, such as vLLM, open a policy folder with transformers' `AutoTokenizer`, which for some models differs from
`tokenizer.json`. A policy is neither trained nor exported if `AutoTokenizer` and `tokenizer.json` differ.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.chat import ChatTemplate
from rollflow.tasks.policies.context import context_length, probe_length
from rollflow.tasks.policies.stop import config_ends, read_token, stop_tokens, tokenizer_end
from rollflow.tasks.policies.tokens.control_text import ControlTokens
from rollflow.tasks.policies.tokens.token_ends import find_ends
from rollflow.tasks.prompts.base import Asked

# pieces of text that, alone or joined, two tokenizers may encode differently
PIECES = ("a", "Zz", "7", "\u0663", "\u00bd", " ", "  ", "\n", "\t", ".", "'s", "e\u0301", "\u65e5", "\U0001f642")
# Texts with at least this number of characters are tokenized by `encode_batch`, which releases Python's lock.
LONG = 10_000


class PolicyTokenizer:
    """Encodes questions and decodes responses, from tokenizer.json and config.json in the policy folder."""

    def __init__(self, folder: Path, now: float | None = None, *, single_start: bool = True) -> None:
        """Open the tokenizer, and fix the time that the chat template reads at `now`, in seconds since the Unix
        epoch.

        By default, `now` is the current time. With `single_start`, a prompt begins with at most one start token and
        does not end with an end token. Without `single_start`, as in old runs, a prompt has all tokens that the
        tokenizer adds, and the context length is `max_position_embeddings`.
        """
        self.folder = folder
        self._now = time.time() if now is None else now
        self._single_start = single_start
        self._fast = _read_tokenizer(folder)
        self._config = json.loads((folder / "config.json").read_text())

    def encode(self, asked: Asked, chat: bool = False, system: str | None = None) -> Sequence[int]:
        """Return the prompt tokens of a question; with `chat`, apply the tokenizer's chat template.

        Raises:
            ConfigError: the chat template rejects the question.
        """
        if chat:
            return self.template.encode(asked, system)
        assert isinstance(asked, str), "only the chat template writes messages"
        return self._plain(asked) if self._single_start else list(self._fast.encode(asked).ids)

    def encode_prompt(self, asked: Asked, chat: bool = False, system: str | None = None) -> Sequence[int]:
        """Encode a question as `encode` does, and check the first and last tokens of the prompt.

        Raises:
            ConfigError: the chat template rejects the question, or the prompt begins with two start tokens or ends with
                an end token.
        """
        tokens = self.encode(asked, chat, system)
        if self._single_start:
            self._check(tokens, asked, chat)
        return tokens

    def encode_response(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without adding special tokens at its beginning or end."""
        if len(text) < LONG:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._fast.encode_batch([text], add_special_tokens=False)[0].ids)

    def cut_control(self, text: str) -> str:
        """Return a text with marks, such that its pieces between the marks contain no control token (see
        `control_text`).
        """
        return self._control.cut(text)

    def cut_message(self, text: str) -> str:
        """Do the same as `cut_control` for a message; other text may directly precede or follow the message."""
        return self._control.cut_message(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, including special tokens."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=False))

    def decode_response(self, tokens: Sequence[int], special: bool = True) -> str:
        """Decode a response to the text that a verifier reads, without the final stop token.

        With `special=False`, all special tokens are left out.
        """
        if not special:
            return str(self._fast.decode(list(tokens)))
        ended = bool(len(tokens)) and tokens[-1] in self.stop_tokens
        return self.decode(tokens[:-1] if ended else tokens)

    def find_tokens(self, tokens: Sequence[int], positions: Sequence[int], special: bool = True) -> list[int]:
        """Return, for each number of characters in `positions`, the index of the token with which the decoded response
        reaches this number.

        If several tokens form a character, the character belongs to the token that completes it. An invalid byte may
        belong to a later token. If the response has fewer characters, the index is that of its last token.
        """
        whole = str(self._fast.decode(list(tokens), skip_special_tokens=not special))

        def count_characters(place: int) -> int:
            prefix = self._fast.decode(list(tokens[: place + 1]), skip_special_tokens=not special)
            if whole.startswith(prefix):
                return len(prefix)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, whole, strict=False)))

        ends = find_ends(self._fast, tokens, whole, special)
        if ends is None:
            found = [bisect_left(range(len(tokens)), position, key=count_characters) for position in positions]
        else:
            found = [bisect_left(ends, position) for position in positions]
        return [min(place, len(tokens) - 1) for place in found]

    def name(self, token: int) -> str:
        """Return a token's text and id, for an error message."""
        return f"{self._fast.id_to_token(token) or '?'} ({token})"

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end a response."""
        return stop_tokens(self.folder)

    @cached_property
    def context(self) -> int:
        """Context length: the largest total number of tokens of a prompt and its response."""
        if not self._single_start and type(named := self._config.get("max_position_embeddings")) is int:
            return named  # older runs chose their prompts by this context length
        return context_length(self._config)

    @property
    def probe_length(self) -> int:
        """Number of tokens of the prompt that checks an engine's weights after a weight update."""
        return probe_length(self._config)

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """The vocabulary: all tokens with their ids, including added tokens."""
        return self._fast.get_vocab(with_added_tokens=True)

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Special tokens and other added tokens, with their ids."""
        return {token.content: id for id, token in self._fast.get_added_tokens_decoder().items()}

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._fast)

    @cached_property
    def has_template(self) -> bool:
        """True if the policy folder has a chat template."""
        described = self.folder / "tokenizer_config.json"
        named = described.exists() and json.loads(described.read_text()).get("chat_template")
        return bool(named or (self.folder / "chat_template.jinja").exists()) and bool(self._loaded.chat_template)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the policy folder.

        Raises:
            ConfigError: the policy folder has no chat template.
        """
        if not self.has_template:
            raise ConfigError(
                "prompts.chat = True: the policy's tokenizer has no chat template; set prompts.chat = false, or give a "
                "new model its policy.cold_start.chat_template"
            )
        return ChatTemplate(self._loaded, self._now)

    @cached_property
    def _loaded(self) -> Any:
        return _open_as_others(self.folder)

    def _plain(self, text: str) -> list[int]:
        """Encode a text, and add the tokenizer's start tokens before it, unless the text already begins with them."""
        before, after = self._added
        own = list(self._fast.encode(text, add_special_tokens=False).ids)
        kept = after[: len(after) - sum(1 for _ in takewhile(self._ends.__contains__, reversed(after)))]
        begun = bool(before) and own[: len(before)] == before
        return [*([] if begun else before), *own, *kept]

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer adds before a text, and tokens that it adds after a text."""
        for text in ("a", *sorted(self.vocabulary.keys() - self.special.keys())):
            if own := self._fast.encode(text, add_special_tokens=False).ids:
                break
        else:
            return [], []
        whole = self._fast.encode(text).ids
        place = next((i for i in range(len(whole)) if whole[i : i + len(own)] == own), 0)
        return list(whole[:place]), list(whole[place + len(own) :])

    @cached_property
    def _ends(self) -> frozenset[int]:
        """End tokens of the tokenizer and of config.json, with which no prompt may end.

        Other end tokens in generation_config.json may end a prompt, because some chat models list the token that begins
        an answer there.
        """
        return frozenset([*tokenizer_end(self.folder), *config_ends(self._config)])

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that the chat template writes after an answer, or None."""
        return self.template.end_of_turn(self.special)

    def _check(self, tokens: Sequence[int], asked: Asked, chat: bool) -> None:
        ends = self._ends | ({self.turn_end} if chat else set())
        if len(tokens) > 1 and tokens[-1] in ends:
            where = "chat = True: the chat template's prompt" if chat else f"the question {asked[-40:]!r}"
            cure = "let it begin an answer (add_generation_prompt)" if chat else "remove that token from it"
            raise ConfigError(f"prompts: {where} ends with the end token {self.name(tokens[-1])}; {cure}")
        if len(tokens) > 1 and tokens[0] == tokens[1] and tokens[0] in self._starts:
            where = "chat = True: the chat template's prompt" if chat else f"the question {asked[:40]!r}"
            raise ConfigError(
                f"prompts: {where} begins with two start tokens {self.name(tokens[0])}; remove one of them"
            )

    @cached_property
    def _starts(self) -> frozenset[int]:
        found = self.special.get(read_token(self.folder, "bos_token") or "")
        return frozenset([*self._added[0][:1], *([] if found is None else [found])])


def _read_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json without its truncation and padding settings, which other tools ignore.

    Raises:
        ConfigError: tokenizer.json is missing or is not a valid tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain `Exception`s
        why = f"{folder}/tokenizer.json cannot be opened ({str(error).splitlines()[0]})"
        raise ConfigError(f"policy.path: {why}; save the tokenizer again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _refuse_errors() -> Iterator[None]:
    """Translate errors of `AutoTokenizer` in a `with` block into `ConfigError`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a tokenizer's class may raise anything here
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"policy.path: AutoTokenizer cannot read the policy's tokenizer ({said}); save the tokenizer again"
        ) from None


def _open_as_others(folder: Path) -> Any:
    """Open the tokenizer with transformers' `AutoTokenizer`, as tools other than rollflow do.

    Raises:
        ConfigError: `AutoTokenizer` cannot open the tokenizer.
    """
    from transformers import AutoTokenizer

    with _refuse_errors():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def find_other_reading(folder: Path, texts: Iterable[str] = ()) -> str | None:
    """Describe how `AutoTokenizer` differs from tokenizer.json, or return None.

    The vocabularies are compared, and also how both tokenizers encode and decode `texts`, special tokens and
    combinations of `PIECES`.

    Raises:
        ConfigError: `AutoTokenizer` cannot read the folder.
    """
    ours, theirs = _read_tokenizer(folder), _open_as_others(folder)
    with _refuse_errors():
        return _difference(ours, theirs, texts)


def _difference(ours: Tokenizer, theirs: Any, texts: Iterable[str]) -> str | None:
    """Describe how the tokenizer `theirs` differs from `ours`, or return None."""
    special = [f"a{token.content} b" for token in ours.get_added_tokens_decoder().values()]
    for text in (*texts, *special, *map("".join, product(PIECES, repeat=3))):
        mine, found = list(ours.encode(text).ids), list(theirs.encode(text))
        if found != mine:
            return f"AutoTokenizer encodes {text!r} as the tokens {found}, and tokenizer.json as {mine}"
        skips = (True, False)
        plain = [theirs.decode(mine, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in skips]
        if plain != [ours.decode(mine, skip_special_tokens=skip) for skip in skips]:
            return f"AutoTokenizer decodes the tokens {mine} to another text than tokenizer.json"
    same = theirs.get_vocab() == ours.get_vocab()
    return None if same else "AutoTokenizer has another vocabulary than tokenizer.json"
