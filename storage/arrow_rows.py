"""Packs groups of trajectories as the raw bytes of Arrow columns. Each group is packed when it is complete, so the
commit of a batch has to join only bytes.

A column of numbers is packed as one byte string. A column of texts or lists is packed as two byte strings: the row
lengths (int32) and the concatenated contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rollflow.storage.records import TrajectoryGroup
from rollflow.storage.token_arrays import Bools, Float32s, Int32s, Int64s, TokenArray

LENGTH = np.dtype(np.int32)
NUMBERS: dict[pa.DataType, np.dtype[Any]] = {
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.float32(): np.dtype(np.float32),
}
FLAT: dict[pa.DataType, type[TokenArray[Any]]] = {pa.int32(): Int32s, pa.float32(): Float32s, pa.bool_(): Bools}
WHOLE: dict[pa.DataType, type[TokenArray[Any]]] = {
    pa.int32(): Int32s,
    pa.int64(): Int64s,
}  # if there are few rows, token arrays pack these data types faster than NumPy
LONG = 1 << 20  # larger columns (in bytes) are joined in Arrow's memory pool, because newly allocated memory is slower
MOST = np.iinfo(LENGTH).max  # largest number of values in a column, because Arrow's offsets have 32 bits


def parts_of(groups: Sequence[TrajectoryGroup], schema: pa.Schema) -> tuple[bytes, ...]:
    """Pack groups of trajectories as byte strings, in the order of the schema's columns."""
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
    """Return the byte strings into which the values of one column are packed."""
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


def count_rows(parts: tuple[bytes, ...]) -> int:
    """Return the number of rows in a result of `parts_of`."""
    return len(parts[0]) // 8


def join_rows(packed: Sequence[tuple[bytes, ...]], schema: pa.Schema) -> pa.Table:
    """Build one Arrow table, in a single chunk, from one or more results of `parts_of`.

    Raises:
        OverflowError: a column has more values than Arrow's 32-bit offsets can address.
    """
    parts = map(_join_parts, zip(*packed, strict=True))
    return pa.table([_column(field.type, parts) for field in schema], schema=schema)


def _join_parts(parts: Sequence[bytes]) -> bytes | pa.Buffer:
    """Concatenate byte strings into one buffer."""
    size = sum(map(len, parts))
    if size < LONG:
        return b"".join(parts)
    whole = pa.allocate_buffer(size)
    np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=np.frombuffer(whole, np.uint8))
    return whole


def _column(kind: pa.DataType, parts: Iterator[bytes | pa.Buffer]) -> pa.Array:
    """Build an Arrow column of type `kind` from the next one or two byte strings of `parts`."""
    if kind in NUMBERS:
        return _numbers(kind, next(parts))
    lengths, contents = np.frombuffer(next(parts), LENGTH), next(parts)
    offsets = build_offsets(lengths)
    if pa.types.is_string(kind):
        return pa.Array.from_buffers(kind, len(lengths), [None, offsets, pa.py_buffer(contents)])
    values = _truths(contents) if kind.value_type == pa.bool_() else _numbers(kind.value_type, contents)
    return pa.Array.from_buffers(kind, len(lengths), [None, offsets], children=[values])


def _numbers(kind: pa.DataType, data: bytes | pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(kind, len(data) // NUMBERS[kind].itemsize, [None, pa.py_buffer(data)])


def _truths(data: bytes | pa.Buffer) -> pa.Array:
    bits = np.packbits(np.frombuffer(data, np.uint8), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(data), [None, pa.py_buffer(bits)])


def build_offsets(lengths: np.ndarray) -> pa.Buffer:
    """Return Arrow's offsets of a list column whose rows have the given lengths.

    Raises: OverflowError: the rows have more values than Arrow's 32-bit offsets can address.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > MOST:
        raise OverflowError(
            f"a column of this batch has {offsets[-1]} values, more than the {MOST} that an Arrow list can contain"
        )
    return pa.py_buffer(offsets.astype(LENGTH))


def view_numbers(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return a NumPy array with the values of an Arrow column that has no nulls; booleans become 0 and 1.

    Arrow's own method `to_numpy` is not used, because it imports pandas, which costs half a second of CPU time and 50
    MB of memory.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0)
    return np.from_dlpack(values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values)
