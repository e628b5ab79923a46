"""Tests of deltas (differences between two weight files of the same size): a delta rebuilds the second file from the
first one, or the file is stored whole. Damaged deltas are refused.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollflow.storage.deltas import delta_file
from rollflow.storage.deltas.changes import decode_positions, decode_steps, encode_changes, unsigned_type
from rollflow.storage.deltas.delta_file import MAGIC, MOST_SHARE, encode_delta, read_delta
from rollflow.storage.deltas.elements import divide_file, list_tensors
from tests.support.delta_weights import nudged, safetensors

TYPES = {"BF16": "<u2", "F32": "<u4", "F64": "<u8", "U8": "u1"}


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rebuilt(before: bytes, data: bytes) -> bytes:
    """Apply a delta as a reader does, and return the resulting file."""
    target = bytearray(before)
    read_delta(memoryview(data)).apply(memoryview(target))
    return bytes(target)


def check_round_trip(before: bytes, after: list[memoryview]) -> bytes | None:
    """Encode and apply a delta; return its bytes, or None if the file should be stored whole."""
    parent = bytearray(before)
    whole = b"".join(after)
    found = encode_delta(memoryview(parent), hashed(before), after)
    if found is None:
        return None
    delta, data = found
    assert (delta.parent, delta.result, delta.size) == (hashed(before), hashed(whole), len(whole))
    assert read_delta(memoryview(data)) == delta
    assert rebuilt(before, data) == whole == bytes(parent)
    return data


@given(
    st.lists(st.tuples(st.sampled_from(sorted(TYPES)), st.integers(0, 700)), min_size=1, max_size=5),
    st.floats(0, 1),
    st.integers(0, 2**32),
    st.sampled_from([3, 64, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_delta_rebuilds_any_safetensors_file(
    shapes: list[tuple[str, int]], share: float, seed: int, elements: int
) -> None:
    """The files have elements of all sizes, empty tensors, and chunks that end within a tensor."""
    draw = np.random.default_rng(seed)
    kinds = [(kind, draw.integers(0, 256, count * int(TYPES[kind][-1]), np.uint8)) for kind, count in shapes]
    old = {f"t{n}": (kind, values.view(TYPES[kind])) for n, (kind, values) in enumerate(kinds)}
    new = {name: (kind, nudged(draw, values, share)) for name, (kind, values) in old.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_file, "CHUNK_ELEMENTS", elements)
        data = check_round_trip(b"".join(safetensors(old)), safetensors(new))
    assert data is None or len(data) <= MOST_SHARE * sum(map(len, safetensors(new)))


@given(st.binary(max_size=4000), st.data())
@settings(max_examples=100, deadline=None)
def test_delta_rebuilds_files_of_any_bytes(before: bytes, data: st.DataObject) -> None:
    """The files are not safetensors files, and are divided into buffers at any positions."""
    after = bytearray(before)
    for place in data.draw(st.lists(st.integers(0, max(len(before) - 1, 0)), max_size=9)) if before else []:
        after[place] ^= data.draw(st.integers(0, 255))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(after)), max_size=4)))
    bounds = zip([0, *cuts], [*cuts, len(after)], strict=True)
    check_round_trip(before, [memoryview(after)[first:last] for first, last in bounds])


@given(st.data(), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_encoded_changes_are_exact_for_all_bit_patterns(data: st.DataObject, width: int) -> None:
    """The integer steps wrap around, so NaN, infinity and the sign are also exact."""
    numbers = arrays.arrays(unsigned_type(width), data.draw(st.integers(1, 600)))
    before, other = data.draw(numbers), data.draw(numbers)
    after = before.copy()
    places = data.draw(st.lists(st.integers(0, len(before) - 1), max_size=len(before) // 3, unique=True))
    after[places] = np.resize(other, len(before))[places]
    found = encode_changes(before, after)
    assert found is not None
    where = decode_positions(found, len(before))
    assert where.tolist() == np.flatnonzero(before != after).tolist()
    if len(where):
        before[where] += decode_steps(found, width)
    assert before.tobytes() == after.tobytes()


def test_sparse_changes_by_one_step_take_few_bytes() -> None:
    """One of 200 bfloat16 elements changes by one step. The entropy of such changes is 0.051 bits per element, so a
    delta can be at most 315 times smaller than the file.
    """
    draw = np.random.default_rng(0)
    values = draw.normal(0, 0.02, 2_000_000).astype(np.float32).view("<u4") >> 16
    old = {"w": ("BF16", values.astype("<u2"))}
    chosen = draw.random(len(values)) < 1 / 200
    new = {"w": ("BF16", (old["w"][1].astype(int) + chosen * draw.choice([1, -1], len(values))).astype("<u2"))}
    data = check_round_trip(b"".join(safetensors(old)), safetensors(new))
    assert data is not None
    assert sum(map(len, safetensors(new))) / len(data) > 280


def test_file_in_which_most_elements_changed_is_stored_whole() -> None:
    draw = np.random.default_rng(0)
    old, new = ({"w": ("F32", draw.integers(0, 2**32, 5000, np.uint32))} for _ in range(2))
    assert check_round_trip(b"".join(safetensors(old)), safetensors(new)) is None


def test_mostly_changed_tensor_is_stored_whole_in_the_delta() -> None:
    draw = np.random.default_rng(0)
    small, large = (draw.integers(0, 2**16, count, np.uint16) for count in (100, 5000))
    old = {"a": ("BF16", small), "b": ("BF16", large)}
    new = {"a": ("BF16", small[::-1].copy()), "b": ("BF16", large)}
    data = check_round_trip(b"".join(safetensors(old)), safetensors(new))
    assert data is not None
    [chunk] = read_delta(memoryview(data)).chunks
    assert chunk.changes == new["a"][1].tobytes()
    assert chunk.positions().tolist() == list(range(100))


def test_file_of_another_size_has_no_delta() -> None:
    assert encode_delta(memoryview(bytearray(8)), "", [memoryview(bytes(9))]) is None


@cache
def a_delta() -> tuple[bytes, bytes, bytes]:
    """Return a file, another file, and the delta between the two."""
    draw = np.random.default_rng(1)
    old = {"w": ("BF16", draw.integers(0, 2**16, 3000, np.uint16)), "x": ("F32", draw.integers(0, 9, 500, np.uint32))}
    new = {name: (kind, nudged(draw, values, 0.05)) for name, (kind, values) in old.items()}
    before, after = b"".join(safetensors(old)), safetensors(new)
    data = check_round_trip(before, after)
    assert data is not None
    return before, b"".join(after), data


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_altered_delta_is_refused_or_gives_another_file(place: int, mask: int) -> None:
    """No altered delta crashes a reader or writes outside of the file. Readers compare the sha256 of the resulting
    file.
    """
    before, after, data = a_delta()
    altered = bytearray(data)
    altered[place % len(data)] ^= mask
    try:
        found = rebuilt(before, bytes(altered))
    except ValueError:
        return
    assert len(found) == len(after)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_truncated_delta_is_refused(length: int) -> None:
    before, _, data = a_delta()
    for wrong in (data[: length % len(data)], data + b"x", MAGIC + bytes(8)):
        with pytest.raises(ValueError):
            rebuilt(before, wrong)


def test_delta_of_a_file_of_another_size_is_refused() -> None:
    before, _, data = a_delta()
    with pytest.raises(ValueError, match="changes a file of"):
        rebuilt(before + b"x", data)


def test_delta_chunks_outside_of_the_file_are_refused() -> None:
    before, _, data = a_delta()
    begin = len(MAGIC) + 8
    size = int.from_bytes(data[len(MAGIC) : begin], "little")
    header, rest = json.loads(data[begin : begin + size]), data[begin + size :]
    changes = [("start", 0, len(before)), ("start", 0, -1), ("count", 1, 2**60), ("width", 2, 3), ("changes", 3, 2**60)]
    for _, index, value in changes:
        told = json.loads(json.dumps(header))
        told["chunks"][0][index] = value
        altered = json.dumps(told).encode()
        with pytest.raises(ValueError):
            rebuilt(before, MAGIC + len(altered).to_bytes(8, "little") + altered + rest)


def test_adjacent_tensors_with_equal_element_size_are_joined() -> None:
    file = b"".join(
        safetensors(
            {"a": ("F32", np.zeros(3, "<u4")), "b": ("BF16", np.zeros(2, "<u2")), "c": ("BF16", np.zeros(1, "<u2"))}
        )
    )
    head = len(file) - 12 - 4 - 2
    found = [
        (stretch.start - head, stretch.end - head, stretch.width)
        for stretch in divide_file(memoryview(file), len(file))
    ]
    assert found == [(-head, 0, 1), (0, 12, 4), (12, 18, 2)]
    assert [(place.name, place.end - place.start) for place in list_tensors(memoryview(file))] == [
        ("a", 12),
        ("b", 4),
        ("c", 2),
    ]
    assert [stretch.width for stretch in divide_file(memoryview(b"no file"), 7)] == [1]
