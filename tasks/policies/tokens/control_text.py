"""Keeps text in messages of tools and environments from becoming control tokens.

A chat template separates the messages of a conversation by control tokens, such as <|im_end|>. A tokenizer turns each
text that looks like such a token into the token. The output of a tool could therefore end its own message, and continue
as the user. `ControlTokens.cut` puts marks into such texts, and the pieces between the marks are tokenized apart:

    output of a tool --> cut --> chat template --> split at the marks --> tokens

The tokens decode to the same text, but a tokenizer that writes a blank before each text writes one after each mark. A
text without control tokens gets no mark, so its tokens are as without `cut`. A control token could also consist of the
end of one message and the beginning of the next one, so `cut_message` marks such ends, too.
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
            if one.content.strip().strip(BLANKS) not in ("", UNREADABLE) and (one.special or len(one.content) > 1)
        }
        starts = {name.strip(BLANKS)[:2] for name in self._names.values()}
        self._hint = re.compile("|".join(map(re.escape, sorted(starts, key=len, reverse=True))))
        # the beginnings and the ends of the tokens' texts, of all lengths
        names = [self._normalize(name).strip(BLANKS) for name in self._names.values()]
        self._longest = max(map(len, names), default=1)
        self._starts = {name[:size] for name in names for size in range(1, len(name))}
        self._ends = {name[size:] for name in names for size in range(1, len(name))}
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

    def cut_message(self, text: str) -> str:
        """Return a text with marks as `cut` does, and with a mark at each end that may be a part of a control token."""
        sizes = range(1, self._longest)
        first, last = self._normalize(text[: 4 * self._longest]), self._normalize(text[-4 * self._longest :])
        before = CUT if any(first.lstrip(BLANKS)[:size] in self._ends for size in sizes) else ""
        after = CUT if any(last[-size:] in self._starts for size in sizes) else ""
        return before + self.cut(text) + after

    def _normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

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
        return text == name or self._normalize(text) == self._normalize(name)
