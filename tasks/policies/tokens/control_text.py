"""Keeps text in messages of tools and environments from becoming control tokens.

A chat template separates messages by control tokens, such as <|im_end|>, and a tokenizer turns their text into these
tokens. Without a protection, the output of a tool could end its own message, and continue as the user.
`ControlTokens.cut` puts marks into such text, and the pieces between the marks are tokenized separately:

    output of a tool --> cut --> chat template --> split at the marks --> tokens

The tokens decode to the same text, except that some tokenizers add a blank after each mark. A text without control
tokens gets no mark. `cut_message` also puts a mark at an end of a message that could form a control token together with
the neighbouring message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

CUT = "\ufdd0"  # the mark: a Unicode noncharacter, which ordinary text does not contain
UNREADABLE = "\ufffd"
BLANKS = " \t\r\n\u2581"  # some tokenizers write "\u2581" for a blank


class ControlTokens:
    """The control tokens of a tokenizer, which the text of a tool must never become. All added tokens are control
    tokens, except blanks and single characters that are not special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._names = {
            id: one.content
            for id, one in added.items()
            if one.content.strip().strip(BLANKS) not in ("", UNREADABLE) and (one.special or len(one.content) > 1)
        }
        starts = {name.strip(BLANKS)[:2] for name in self._names.values()}
        self._hint = re.compile("|".join(map(re.escape, sorted(starts, key=len, reverse=True))))
        # `_starts` and `_ends` contain all beginnings and all ends of the control tokens' texts.
        names = [self._normalize(name).strip(BLANKS) for name in self._names.values()]
        self._longest = max(map(len, names), default=1)
        self._starts = {name[:size] for name in names for size in range(1, len(name))}
        self._ends = {name[size:] for name in names for size in range(1, len(name))}
        # A normalizer may turn other characters into the text of a control token.
        self._normalizes = tokenizer.normalizer is not None and any(added[id].normalized for id in self._names)

    def cut(self, text: str) -> str:
        """Return a text with marks, such that no piece between two marks contains the text of a control token."""
        text = text.replace(CUT, UNREADABLE)
        if not self._names or not (self._normalizes or self._hint.search(text)):
            return text
        pieces, found = list[str](), [text]
        while found != pieces:  # a part of a control token may be the text of another one
            pieces = found
            encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
            found = [part for piece, one in zip(pieces, encoded, strict=True) for part in self._divide(piece, one)]
        return CUT.join(pieces)

    def cut_message(self, text: str) -> str:
        """Return a text with the marks of `cut`, and with a mark at an end that could be a part of a control token."""
        sizes = range(1, self._longest)
        first, last = self._normalize(text[: 4 * self._longest]), self._normalize(text[-4 * self._longest :])
        before = CUT if any(first.lstrip(BLANKS)[:size] in self._ends for size in sizes) else ""
        after = CUT if any(last[-size:] in self._starts for size in sizes) else ""
        return before + self.cut(text) + after

    def _normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _divide(self, piece: str, encoded: Any) -> Iterator[str]:
        """Yield the parts of a piece of text, which is divided inside of each control token's text."""
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
        """Return whether `text` is the text of the token `name`. An unknown character is not the text of <unk>,
        although it becomes this token."""
        return text == name or self._normalize(text) == self._normalize(name)
