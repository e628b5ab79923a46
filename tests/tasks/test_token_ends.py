"""The token with which a decoded response reaches a number of characters, also in bytes that are not UTF-8."""

from __future__ import annotations

from itertools import accumulate, takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.policies.tokens.token_ends import _byte_letters

# bytes of all kinds: letters, first and later bytes of characters, and bytes that are never valid
BYTES = st.lists(st.sampled_from([0x61, 0x20, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x99, 0x82, 0x80, 0xFF]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    """Make a byte-level tokenizer, most of whose tokens are single bytes."""
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["2+2=4. So it is 5."] * 10).items():
        (path / name).write_bytes(data)
    return PolicyTokenizer(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return build_byte_tokenizer(tmp_path_factory.mktemp("llama"))


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab \n\u65e5\u00e9\U0001f642.5"), max_size=12), st.booleans())
def test_found_tokens_agree_with_decoded_prefixes(tokenizer: PolicyTokenizer, text: str, ends: bool) -> None:
    """A token ends where the text of all tokens up to it agrees with the whole text."""
    tokens = [*tokenizer.encode_response(text), *(tokenizer.stop_tokens[:1] if ends else ())]
    whole, expected = tokenizer.decode(tokens), []
    for count in range(1, len(tokens) + 1):
        prefix = tokenizer.decode(tokens[:count])
        pairs = zip(prefix, whole, strict=False)
        expected.append(len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
    positions = range(1, expected[-1] + 1) if expected else []
    found = [next(at for at, end in enumerate(expected) if end >= position) for position in positions]
    assert tokenizer.find_tokens(tokens, positions) == found


@pytest.mark.parametrize(
    ("tokens", "positions", "found"),
    [
        (["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a"], [1, 2], [3, 4]),  # one character of four bytes
        (["<0x82>", "a", "<0xF0>", "<0x9F>", "a"], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4]),  # bytes that are not UTF-8
        (["<0xC3>", "<0xA9>", "<0xFF>", "a"], [3, 4], [2, 3]),  # with the third byte, the first two are invalid
        (["a", "<0xF0>"], [1, 2], [0, 1]),
    ],
)
def test_token_of_a_position_is_found_among_byte_tokens(
    llama: PolicyTokenizer, tokens: list[str], positions: list[int], found: list[int]
) -> None:
    assert llama.find_tokens([llama.vocabulary[token] for token in tokens], positions) == found


def test_blank_before_a_partial_character_is_found_at_its_token(tmp_path: Path) -> None:
    """Tokenizers like that of GPT-2 have tokens of a blank and the first bytes of an emoji."""
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for merged in ("\u00f0\u0141", "\u0120\u00f0\u0141", "\u013b\u0124"):
        vocabulary[merged] = len(vocabulary)
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.decoder = decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    tokens = [vocabulary[token] for token in ("o", "k", "\u0120\u00f0\u0141", "\u013b\u0124")]
    tokenizer = PolicyTokenizer(tmp_path)
    assert tokenizer.decode(tokens) == "ok \U0001f642"
    assert tokenizer.find_tokens(tokens, [1, 2, 3, 4]) == [0, 1, 2, 3]


def build_byte_tokenizer(folder: Path) -> PolicyTokenizer:
    """Build a tokenizer with a token for each byte, and the special token `<end>`."""
    vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "a": 256, "\u2581b": 257}
    fast = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens(["<end>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return PolicyTokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(BYTES)
def test_character_is_found_at_most_three_byte_tokens_later(tokenizer: PolicyTokenizer, found: list[int]) -> None:
    """No character is found before its token, or more than three tokens of one byte after it."""
    letters = {byte: letter for letter, byte in _byte_letters().items()}
    tokens = [tokenizer.vocabulary[letters[byte]] for byte in found]
    whole = bytes(found).decode("utf-8", "replace")
    assert tokenizer.decode(tokens) == whole
    places = tokenizer.find_tokens(tokens, range(1, len(whole) + 1))
    for position, place in enumerate(places, 1):
        if place + 1 < len(tokens):
            assert bytes(found[: place + 1]).decode("utf-8", "replace").startswith(whole[:position])
        earlier = bytes(found[: max(0, place - 3)]).decode("utf-8", "replace")
        assert not earlier.startswith(whole[:position])
    assert places == sorted(places)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(BYTES, st.sampled_from(["a", "\u2581b", "<end>"])), max_size=8), st.booleans())
def test_token_ends_among_byte_tokens_match_a_model(
    llama: PolicyTokenizer, parts: list[list[int] | str], special: bool
) -> None:
    """A sequence of byte tokens is text if it is valid UTF-8, else a replacement character for each byte."""
    tokens, text, places, run = list[int](), "", list[int](), list[tuple[int, int]]()
    for part in [*parts, None]:
        if isinstance(part, list):
            run += [(len(tokens) + at, byte) for at, byte in enumerate(part)]
            tokens += part
        elif part != "<end>" or special:
            text, places = add_run(text, places, run)
            run = []
            read = (part or "").replace("\u2581", " ")
            text, places = text + read, places + [len(tokens)] * len(read)
        tokens += [llama.vocabulary[part]] if isinstance(part, str) else []
    places = places[text.startswith(" ") :]
    assert llama.decode_response([*tokens, 256], special)[:-1] == text.removeprefix(" ")
    assert llama.find_tokens([*tokens, 256], range(1, len(places) + 1), special) == places


def add_run(text: str, places: list[int], run: list[tuple[int, int]]) -> tuple[str, list[int]]:
    """Add the characters of a sequence of bytes, and the tokens at which they end."""
    try:
        characters = bytes(byte for _, byte in run).decode()
    except UnicodeDecodeError:
        return text + "\ufffd" * len(run), [*places, *(at for at, _ in run)]
    ends = accumulate(len(character.encode()) for character in characters)
    return text + characters, [*places, *(run[end - 1][0] for end in ends)]


@pytest.mark.parametrize("byte", [0x80, 0xE6, 0xFF])
def test_long_response_of_invalid_bytes_is_decoded_once(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch, byte: int
) -> None:
    """The work does not grow with the number of positions; a search for each position would need about 14 decodings."""
    letters, calls = {byte: letter for letter, byte in _byte_letters().items()}, list[int]()
    tokens = [tokenizer.vocabulary[letters[byte]]] * 16_000
    fast = tokenizer._fast

    class Counting:
        def decode(self, tokens: list[int], **options: bool) -> str:
            calls.append(len(tokens))
            return str(fast.decode(tokens, **options))

        def __getattr__(self, name: str) -> object:
            return getattr(fast, name)

    monkeypatch.setattr(tokenizer, "_fast", Counting())
    found = tokenizer.find_tokens(tokens, range(1, 1001))
    assert found == sorted(found)
    assert calls == [16_000]
