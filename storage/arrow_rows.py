"""Trajectory groups as raw columns: the bytes that Arrow keeps in memory, so that to join groups is to join bytes.

A group is packed when it is complete, while others are still generated. So a commit only has to join. Each field of the
schema has one or two parts, in the schema's order, for R rows:

- a number: R values;
- text or a list: R lengths (int32), then all rows' contents one after the other (truth values as a byte each).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rollflow.storage.records import TrajectoryGroup
from rollflow.storage.token_arrays import Bools, Flat, Float32s, Int32s, Int64s

LENGTH = np.dtype(np.int32)
NUMBERS: dict[pa.DataType, np.dtype[Any]] = {
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.float32(): np.dtype(np.float32),
}
FLAT: dict[pa.DataType, type[Flat[Any]]] = {pa.int32(): Int32s, pa.float32(): Float32s, pa.bool_(): Bools}
WHOLE: dict[pa.DataType, type[Flat[Any]]] = {pa.int32(): Int32s, pa.int64(): Int64s}  # quicker than NumPy's, for a few
LONG = 1 << 20  # bytes
MOST = np.iinfo(LENGTH).max  # the most that one column may hold: Arrow's offsets have 32 bits


def parts_of(groups: Sequence[TrajectoryGroup], schema: pa.Schema) -> tuple[bytes, ...]:
    """The rows of the groups, column by column."""
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    same: dict[str, list[Any]] = {
        "index": [g.key.prompt for g in groups for _ in g.trajectories],
        "attempt": [g.key.attempt for g in groups for _ in g.trajectories],
        "prompt_id": [g.prompt_id for g in groups for _ in g.trajectories],
        "domain": [g.domain for g in groups for _ in g.trajectories],
    }

    def values(name: str) -> list[Any]:
        return same[name] if name in same else list(map(attrgetter(name), rows))

    return tuple(part for field in schema for part in _parts(field.type, values(field.name)))


def _parts(kind: pa.DataType, rows: list[Any]) -> list[bytes]:
    """One column; rows that are flat are joined as they are."""
    if kind in WHOLE:
        return [WHOLE[kind].of(rows).data]
    if kind in NUMBERS:
        return [np.array(rows, NUMBERS[kind]).tobytes()]
    if pa.types.is_string(kind):
        rows = [text.encode() for text in rows]
        return [_lengths(rows), b"".join(rows)]
    flat = list(map(FLAT[kind.value_type].of, rows))
    return [_lengths(flat), b"".join([row.data for row in flat])]


def _lengths(rows: Sequence[Any]) -> bytes:
    return Int32s.of(list(map(len, rows))).data


def joined(packed: Sequence[tuple[bytes, ...]], schema: pa.Schema) -> pa.Table:
    """The table of all rows, in one chunk; `packed` are the parts of at least one sequence of groups.

    Raises:
        OverflowError: a column holds more than Arrow's 32-bit offsets reach.
    """
    parts = map(_whole, zip(*packed, strict=True))
    return pa.table([_column(field.type, parts) for field in schema], schema=schema)


def _whole(parts: Sequence[bytes]) -> bytes | pa.Buffer:
    """The parts as one, the long ones in memory of Arrow's: it keeps that, and new pages take longer than a copy."""
    size = sum(map(len, parts))
    if size < LONG:
        return b"".join(parts)
    whole = pa.allocate_buffer(size)
    np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=np.frombuffer(whole, np.uint8))
    return whole


def _column(kind: pa.DataType, parts: Iterator[bytes | pa.Buffer]) -> pa.Array:
    """The next column of `parts`."""
    if kind in NUMBERS:
        return _numbers(kind, next(parts))
    lengths, contents = np.frombuffer(next(parts), LENGTH), next(parts)
    offsets = _offsets(lengths)
    if pa.types.is_string(kind):
        return pa.Array.from_buffers(kind, len(lengths), [None, offsets, pa.py_buffer(contents)])
    values = _truths(contents) if kind.value_type == pa.bool_() else _numbers(kind.value_type, contents)
    return pa.Array.from_buffers(kind, len(lengths), [None, offsets], children=[values])


def _numbers(kind: pa.DataType, data: bytes | pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(kind, len(data) // NUMBERS[kind].itemsize, [None, pa.py_buffer(data)])


def _truths(data: bytes | pa.Buffer) -> pa.Array:
    bits = np.packbits(np.frombuffer(data, np.uint8), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(data), [None, pa.py_buffer(bits)])


def _offsets(lengths: np.ndarray) -> pa.Buffer:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > MOST:
        raise OverflowError(f"a column of this batch holds {offsets[-1]} values, Arrow's lists reach {MOST}")
    return pa.py_buffer(offsets.astype(LENGTH))
