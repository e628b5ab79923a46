"""Computes where each token of a response ends in the decoded text, in linear time.

Tokens may contain parts of characters, or bytes that are not valid UTF-8, so several methods are tried. A method of
decoding is used only if it reproduces the decoded response.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, groupby

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
STAND_IN = "<0x3F>"  # a question mark
REPLACEMENT = "\ufffd"  # the character that a decoder writes for invalid bytes


def find_ends(fast: Tokenizer, tokens: Sequence[int], whole: str, special: bool) -> list[int] | None:
    """Return, for each token, the number of characters of `whole` up to the end of the token; None if no method
    works.

    With `special = False`, special tokens have no characters. If several tokens form a character, the character belongs
    to the token that completes it. An invalid byte belongs to its own token, or to a token up to three bytes later.
    """
    left_out = set[int]() if special else _special_tokens(fast)
    kept = [token for token in tokens if token not in left_out]
    # `_decode_stepwise` is last, because it is inexact if a token ends with a part of a character.
    methods = (_decode_bytes, *([_decode_replaced] if REPLACEMENT in whole else []), _decode_stepwise)
    ends = next((ends for method in methods if (ends := method(fast, kept, whole)) is not None), None)
    if ends is None or len(kept) == len(tokens):
        return ends
    return _repeat_ends(chain([0], ends), (token in left_out for token in tokens))


def _special_tokens(fast: Tokenizer) -> set[int]:
    return {token for token, added in fast.get_added_tokens_decoder().items() if added.special}


def _repeat_ends(ends: Iterable[int], are_left_out: Iterable[bool]) -> list[int]:
    """Return the end of every token; a token that is left out ends where the token before it ends. `ends` begins with
    0.
    """
    ends = iter(ends)
    end, repeated = next(ends), list[int]()
    for is_left_out in are_left_out:
        end = end if is_left_out else next(ends)
        repeated.append(end)
    return repeated


def _decode_stepwise(fast: Tokenizer, tokens: Sequence[int], whole: str) -> list[int] | None:
    """Decode one token after another; return None if the decoded text differs from the beginning of the whole text."""
    stream, text, ends = DecodeStream(skip_special_tokens=False), list[str](), list[int]()
    end = 0
    try:
        for token in tokens:
            text.append(stream.step(fast, token) or "")
            end += len(text[-1])
            ends.append(end)
    except Exception:  # noqa: BLE001 - tokenizers raises plain `Exception`s
        return None
    return ends if whole.startswith("".join(text)) else None


def _decode_bytes(fast: Tokenizer, tokens: Sequence[int], whole: str) -> list[int] | None:
    """Decode the bytes of byte-level tokens, with a replacement character for bytes that are not valid UTF-8."""
    decoder, text, ends = getincrementaldecoder("utf-8")("replace"), list[str](), list[int]()
    end = 0
    for token in tokens:
        text.append(decoder.decode(_read_bytes(fast.id_to_token(token) or "")))
        end += len(text[-1])
        ends.append(end)
    text.append(decoder.decode(b"", final=True))
    return ends if "".join(text) == whole else None


def _decode_replaced(fast: Tokenizer, tokens: Sequence[int], whole: str) -> list[int] | None:
    """Decode a copy of the response in which question marks replace invalid byte tokens.

    The length of the text stays the same, because the decoder writes one replacement character for every invalid
    byte.
    """
    stand_in = fast.token_to_id(STAND_IN)
    if stand_in is None:
        return None
    replaced = list[int]()
    bytes_T = [BYTE_TOKEN.fullmatch(fast.id_to_token(token) or "") for token in tokens]
    for is_byte, places in groupby(range(len(tokens)), key=lambda place: bytes_T[place] is not None):
        run = list(places)
        found = bytes(int(match[1], 16) for place in run if (match := bytes_T[place]))
        valid = not is_byte or REPLACEMENT not in found.decode("utf-8", "replace")
        replaced += [tokens[place] if valid else stand_in for place in run]
    text = str(fast.decode(replaced, skip_special_tokens=False))
    return _decode_stepwise(fast, replaced, text) if len(text) == len(whole) else None


def _read_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary; added tokens are plain text."""
    table = _byte_letters()
    try:
        return bytes(table[letter] for letter in token)
    except KeyError:
        return token.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """Return a mapping from each letter of a byte-level vocabulary to its byte, as defined by GPT-2.

    Visible Latin-1 characters stand for their own bytes, and characters from 256 on for the other bytes.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = sorted(set(range(256)) - set(visible))
    return {**{chr(byte): byte for byte in visible}, **{chr(256 + place): byte for place, byte in enumerate(others)}}
