"""Keeps text in messages of tools and environments from becoming control tokens.

A chat template separates the messages of a conversation by control tokens, such as <|im_end|>. A tokenizer turns each
text that looks like such a token into the token. The output of a tool could therefore end its own message, and continue
as the user. `ControlTokens.cut` puts marks into such texts, and the pieces between the marks are tokenized apart:

    output of a tool --> cut --> chat template --> split at the marks --> tokens that decode to the same text

A text without control tokens gets no mark, so its tokens are as without `cut`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

CUT = "\ufdd0"  # the mark, a noncharacter: no text for people has it
UNREADABLE = "\ufffd"
BLANKS = " \t\r\n\u2581"  # "\u2581" is the blank of some tokenizers


class ControlTokens:
    """The tokens of a tokenizer that no text of a tool may become: all added tokens, special or not, that are not
    layout, as a run of blanks is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._names = {
            id: one.content
            for id, one in added.items()
            if one.content.strip(BLANKS) and (one.special or len(one.content) > 1)
        }
        starts = {name.strip(BLANKS)[:2] for name in self._names.values()}
        self._hint = re.compile("|".join(map(re.escape, sorted(starts, key=len, reverse=True))))
        # a normalizer may turn other characters into those of a token
        self._normalizes = tokenizer.normalizer is not None and any(added[id].normalized for id in self._names)

    def cut(self, text: str) -> str:
        """Return a text with marks, such that no piece between two marks has a control token."""
        text = text.replace(CUT, UNREADABLE)
        if not self._names or not (self._normalizes or self._hint.search(text)):
            return text
        pieces, found = list[str](), [text]
        while found != pieces:  # pieces of one token may be another token
            pieces = found
            encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
            found = [part for piece, one in zip(pieces, encoded, strict=True) for part in self._divide(piece, one)]
        return CUT.join(pieces)

    def _divide(self, piece: str, encoded: Any) -> Iterator[str]:
        """Yield the parts of a piece, which is divided within the text of each control token."""
        done = 0
        for id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            text = piece[start:end]
            if id not in self._names or not self._is_text_of(text.strip(), self._names[id].strip()):
                continue
            if len(text.strip()) == 1:
                yield piece[done:start] + UNREADABLE
                done = end
            else:
                cut = start + len(text) - len(text.lstrip()) + 1  # some tokens include the blanks before them
                yield piece[done:cut]
                done = cut
        yield piece[done:]

    def _is_text_of(self, text: str, name: str) -> bool:
        """Return whether a text is that of a token. A character that the tokenizer does not know is none: it becomes
        the token <unk>, too."""
        normalizer = self._tokenizer.normalizer
        return text == name or (
            normalizer is not None and normalizer.normalize_str(text) == normalizer.normalize_str(name)
        )
