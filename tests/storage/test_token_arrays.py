"""Tests of token arrays: they can be read like tuples, and consist of the same bytes as an Arrow array."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.token_arrays import LENGTHS, Bools, Float32s, Int16s, Int32s, Int64s, TokenArray, _packer

INTS = st.integers(-(2**31), 2**31 - 1)
KINDS: dict[type[TokenArray[Any]], st.SearchStrategy[Any]] = {
    Int16s: st.integers(-(2**15), 2**15 - 1),
    Int32s: INTS,
    Int64s: st.integers(-(2**63), 2**63 - 1),
    Float32s: st.floats(width=32, allow_nan=False),
    Bools: st.booleans(),
}
ROWS = st.one_of(*(st.tuples(st.just(kind), st.lists(number, max_size=9)) for kind, number in KINDS.items()))


@given(ROWS, st.slices(9), st.integers(-9, 8))
def test_token_array_reads_like_a_tuple(row: tuple[type[TokenArray[Any]], list[Any]], cut: slice, place: int) -> None:
    kind, numbers = row
    flat, plain = kind.of(numbers), tuple(numbers)
    assert (len(flat), tuple(flat), flat == plain, plain == flat) == (len(plain), plain, True, True)
    assert flat[cut] == plain[cut]
    assert isinstance(flat[cut], kind)
    assert flat + plain == plain + flat == kind.concatenate([flat, flat]) == plain + plain
    assert hash(flat) == hash(plain)
    assert kind.of(flat) is flat
    assert pickle.loads(pickle.dumps(flat)) == copy.deepcopy(flat) == flat  # noqa: S301  made right here
    assert bool(flat) == bool(plain)
    if -len(plain) <= place < len(plain):
        assert flat[place] == plain[place]
    else:
        with pytest.raises(IndexError):
            flat[place]


@given(st.lists(INTS, max_size=5), st.lists(INTS, max_size=5))
def test_token_array_equals_only_the_same_numbers(one: list[int], other: list[int]) -> None:
    assert (Int32s.of(one) == Int32s.of(other)) == (one == other) == (Int32s.of(one) == tuple(other))
    assert Int32s.of(one) != "".join(map(str, one))
    assert Int32s.of(one) != object()
    assert Int32s.of(one) != ["a"] * max(1, len(one))


def test_token_array_has_the_bytes_of_an_arrow_array() -> None:
    for kind, arrow in ((Int32s, pa.int32()), (Float32s, pa.float32())):
        numbers = [3, -1, 7]
        assert kind.of(numbers).data == pa.array(numbers, arrow).buffers()[1].to_pybytes()[:12]
    assert Bools.of([True, False]).data == b"\x01\x00"


def test_token_array_rounds_numbers_to_its_type() -> None:
    assert Float32s.of([0.1]) == (0.1,)
    assert Float32s.of([0.1])[0] == float(np.float32(0.1)) != 0.1
    for wrong in ([2**31], ["a"], [1.5]):
        with pytest.raises(TypeError, match="Int32s: "):
            Int32s.of(wrong)  # type: ignore[arg-type]


def test_int32s_same_returns_one_number_repeated() -> None:
    assert Int32s.same(-1, 3) == (-1, -1, -1)
    assert Int32s.same(5, 0) == Int32s.same(5, -2) == Int32s() == ()
    assert repr(Int32s.same(7, 2)) == "Int32s.of([7, 7])"


def test_token_array_index_may_be_a_numpy_integer() -> None:
    """A user-defined environment may index its response with NumPy integers."""
    flat = Int32s.of([4, 9, 7])
    assert flat[np.argmax(flat.array)] == 9
    assert flat[np.int64(1) :] == (9, 7)
    with pytest.raises(TypeError):
        flat["1"]  # type: ignore[call-overload]


def test_pickled_slice_of_a_token_array_excludes_the_rest() -> None:
    whole = Int32s.same(1, 100_000)
    for piece in (whole[5:7], whole[::50_000], Int32s.concatenate([whole[:1], whole[-1:]])):
        assert len(pickle.dumps(piece)) < 200
        assert sys.getsizeof(piece.data) < 200


def test_cache_of_token_array_packers_is_bounded() -> None:
    for count in range(3 * LENGTHS):
        _packer(count, "i")
    assert _packer.cache_info().currsize <= LENGTHS


def test_int32s_array_property_is_a_read_only_view() -> None:
    found = Int32s.of([1, 2, 3]).array
    assert found.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 9
