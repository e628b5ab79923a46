"""The number of characters of a decoded response up to the end of each of its tokens, in time linear in the response.

Tokens may hold parts of characters, and a policy may sample bytes that are not valid UTF-8. An invalid byte becomes a
replacement character, and may change how the bytes before it are decoded. Three methods exist, and a method is used
only if its text is the decoded response: decoding one token after another, decoding the bytes of the tokens (byte-level
vocabularies), and decoding with a question mark for each invalid byte (vocabularies with a token for each byte, as
Llama 2 has).
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
REPLACEMENT = "\ufffd"  # what a decoder writes for invalid bytes


def find_ends(fast: Tokenizer, tokens: Sequence[int], whole: str, special: bool) -> list[int] | None:
    """Return the number of characters of `whole`, the decoded response, up to the end of each token.

    Without `special`, special tokens have no characters. A token that ends within a character does not count the
    character. A byte that belongs to no character counts at its token, or up to three bytes later. Return None if the
    text of a token depends on later tokens in another way.
    """
    left_out = set[int]() if special else _special_tokens(fast)
    kept = [token for token in tokens if token not in left_out]
    # `_decode_stepwise` is the last: it counts a character late whose token ends with a part of the next character
    methods = (_decode_bytes, *([_decode_replaced] if REPLACEMENT in whole else []), _decode_stepwise)
    ends = next((ends for method in methods if (ends := method(fast, kept, whole)) is not None), None)
    if ends is None or len(kept) == len(tokens):
        return ends
    return _repeat_ends(chain([0], ends), (token in left_out for token in tokens))


def _special_tokens(fast: Tokenizer) -> set[int]:
    return {token for token, added in fast.get_added_tokens_decoder().items() if added.special}


def _repeat_ends(ends: Iterable[int], are_left_out: Iterable[bool]) -> list[int]:
    """Give each token that is left out the end of the token before it. `ends` begins with 0."""
    ends = iter(ends)
    end, repeated = next(ends), list[int]()
    for is_left_out in are_left_out:
        end = end if is_left_out else next(ends)
        repeated.append(end)
    return repeated


def _decode_stepwise(fast: Tokenizer, tokens: Sequence[int], whole: str) -> list[int] | None:
    """Decode one token after another; None if a decoded prefix differs from the beginning of the whole text."""
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
    """Decode with a question mark for each byte token of a run of byte tokens that is not valid UTF-8.

    The decoder of such vocabularies writes a replacement character for every byte of the run, so the text has the same
    length as with question marks.
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
    """Return the bytes of a token's text in a byte-level vocabulary; added tokens are plain text."""
    table = _byte_letters()
    try:
        return bytes(table[letter] for letter in token)
    except KeyError:
        return token.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter of a byte-level vocabulary, as defined by GPT-2.

    Visible Latin-1 characters stand for their own bytes, and the characters from 256 on for the other bytes.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = sorted(set(range(256)) - set(visible))
    return {**{chr(byte): byte for byte in visible}, **{chr(256 + place): byte for place, byte in enumerate(others)}}
