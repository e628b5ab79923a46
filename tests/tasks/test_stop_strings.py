"""Tests stop strings on random responses: a response ends at the first token with which its decoded text contains a
stop string.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, Metaspace
from tokenizers.models import BPE, WordLevel

from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.stop_strings import NO_STOPS, StopWatch, watch_stops

BYTES = Tokenizer(BPE({char: token for token, char in enumerate("abcĠĊâĤ¬")} | {"ab": 8, "Ġa": 9, "âĤ": 10}, []))
BYTES.decoder = ByteLevel()
WORDS = Tokenizer(WordLevel({word: token for token, word in enumerate(["▁a", "b", "▁", "▁ab", "c▁a"])}, "b"))
WORDS.decoder = Metaspace()
TOKENS = st.integers(0, 10)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([BYTES, WORDS]),
    st.lists(TOKENS, max_size=40),
    st.lists(st.text("abc \n€", min_size=1, max_size=4), min_size=1, max_size=2),
    st.integers(0, 40),
)
def test_first_stop_string_ends_the_response(fast: Tokenizer, tokens: list[int], stop: list[str], cut: int) -> None:
    def decode(tokens: object) -> str:
        return str(fast.decode(tokens, skip_special_tokens=False))

    ends = [count for count in range(1, len(tokens) + 1) if any(one in decode(tokens[:count]) for one in stop)]
    end = next(iter(ends), None)
    assert StopWatch(stop, decode).find_end(tokens) == end
    cut = min(cut, len(tokens) if end is None else end - 1)
    rest = StopWatch(stop, decode, tokens[:cut]).find_end(tokens[cut:])
    assert rest == (None if end is None else end - cut)


def test_missing_tokenizer_is_an_error_only_with_stop_strings(tmp_path: Path) -> None:
    assert watch_stops((), tmp_path).find_end([1, 2, 3]) is None
    assert watch_stops(("b",), None).find_end(map(ord, "abc")) == 2
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be opened"):
        watch_stops(("b",), tmp_path)


def test_responses_without_stop_strings_share_a_watch(tmp_path: Path) -> None:
    assert watch_stops((), tmp_path, [1, 2]) is watch_stops((), None) is NO_STOPS
    assert NO_STOPS.find_end([3, 4]) is None
    assert not NO_STOPS.stopped
    assert not NO_STOPS._newest
