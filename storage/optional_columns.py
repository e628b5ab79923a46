"""Packs and reads the optional columns of a trajectory batch, which only some runs use. A null stands for a row without
a value, and a column without any value is left out of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rollflow.storage.arrow_rows import build_offsets
from rollflow.storage.errors import Corrupt
from rollflow.storage.model_input import ForeignPart, PlacedPart
from rollflow.storage.records import Branch, Outcome, Trajectory
from rollflow.storage.token_arrays import Float32s, Int16s, Int32s, Int64s, TokenArray, TokenSets

FOREIGN = pa.struct([("position", pa.int32()), ("length", pa.int32()), ("kind", pa.utf8()), ("sha256", pa.utf8())])
COLUMNS = (
    pa.field("reward_parts", pa.map_(pa.utf8(), pa.float64())),
    pa.field("outcome", pa.dictionary(pa.int8(), pa.utf8())),
    pa.field("turn_starts", pa.list_(pa.int32())),
    pa.field("branch", pa.struct([("parent", pa.int32()), ("position", pa.int32())])),
    pa.field("routed_experts", pa.list_(pa.int16())),
    pa.field("kept_tokens", pa.list_(pa.list_(pa.int32()))),
    pa.field("foreign_parts", pa.list_(FOREIGN)),
    pa.field("scorer_version", pa.dictionary(pa.int16(), pa.utf8())),  # each version string is stored once in a batch
    pa.field("token_rewards", pa.list_(pa.float32())),
    pa.field("turn_states", pa.list_(pa.int64())),
    pa.field("role", pa.dictionary(pa.int32(), pa.utf8())),
    pa.field("left_out", pa.bool_()),
)
NAMES = tuple(field.name for field in COLUMNS)
NUMBERS: dict[pa.DataType, type[TokenArray[Any]]] = {
    pa.int16(): Int16s,
    pa.int32(): Int32s,
    pa.int64(): Int64s,
    pa.float32(): Float32s,
}
NOTHING = (None,) * len(NAMES)

Arrays = Mapping[str, pa.Array]

_values = attrgetter(*NAMES)


def pack(rows: Sequence[Trajectory]) -> Arrays:
    """Convert optional values of rows to Arrow; return one array for each column that has a value in at least one
    row."""
    values = list(map(_values, rows))
    if all(row == NOTHING for row in values):
        return {}
    columns = zip(COLUMNS, zip(*values, strict=True), strict=True)
    return {f.name: _build(f.type, column) for f, column in columns if any(value is not None for value in column)}


def join(groups: Sequence[tuple[int, Arrays]]) -> dict[str, pa.Array]:
    """Join the Arrow arrays of several groups; `groups` contains each group's number of rows and its arrays by column
    name.

    Raises:
        OverflowError: a column has more values than Arrow's 32-bit offsets can address.
    """
    present = set[str]().union(*(arrays for _, arrays in groups))
    try:
        return {
            name: pa.concat_arrays(
                [arrays[name] if name in arrays else pa.nulls(rows, kind) for rows, arrays in groups]
            )
            for name, kind in ((field.name, field.type) for field in fields(present))
        }
    except pa.ArrowInvalid as error:
        raise OverflowError(
            f"an optional column of this batch has more values than Arrow can store: {error}"
        ) from error


def fields(names: Collection[str]) -> list[pa.Field]:
    """Return the Arrow fields of the optional columns with the given names, in the order of `COLUMNS`."""
    return [field for field in COLUMNS if field.name in names]


def has_inner_nulls(column: pa.Array) -> bool:
    """Return whether a value in the column contains a null, which rollflow never writes."""
    return any(part.null_count > 0 or has_inner_nulls(part) for part in _parts(column))


def read(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the optional values of one row of a batch from Arrow's types to the types of a `Trajectory`.

    Raises:
        Corrupt: the row contains a value that no trajectory can have.
    """
    return {name: _READERS[name](row[name]) for name in NAMES if row.get(name) is not None}


def read_outcome(name: str) -> Outcome:
    """Convert the stored name of a scorer's judgement to an `Outcome`; raise `Corrupt` if no `Outcome` has this
    name."""
    try:
        return Outcome(name)
    except ValueError:
        raise Corrupt(f"a trajectory has the outcome {name!r}; expected one of {[*map(str, Outcome)]}") from None


def read_parts(column: pa.Array) -> list[tuple[PlacedPart, ...]]:
    """Return the parts of each row that are not tokens, such as images."""
    return [_read_placed(row or ()) for row in column.to_pylist()]


def _read_placed(found: Iterable[Mapping[str, Any]]) -> tuple[PlacedPart, ...]:
    return tuple(PlacedPart(one["position"], ForeignPart(one["kind"], one["sha256"], one["length"])) for one in found)


_READERS: dict[str, Callable[[Any], Any]] = {
    "reward_parts": dict,
    "outcome": read_outcome,
    "turn_starts": tuple,
    "branch": lambda found: Branch(**found),
    "routed_experts": Int16s.of,
    "kept_tokens": TokenSets.of,
    "foreign_parts": _read_placed,
    "scorer_version": str,
    "token_rewards": Float32s.of,
    "turn_states": Int64s.of,
    "role": str,
    "left_out": bool,
}


def _build(kind: pa.DataType, rows: Sequence[Any]) -> pa.Array:
    """Build one column. Columns are built from bytes, because `pa.array` would import pandas into the scheduler's
    process.
    """
    if pa.types.is_map(kind):
        return _maps(kind, rows)
    if pa.types.is_struct(kind):
        fields = zip(*[(0,) * kind.num_fields if row is None else row for row in rows], strict=True)
        children = [_array(kind[i].type, [NUMBERS[kind[i].type].of(values)]) for i, values in enumerate(fields)]
        return pa.Array.from_buffers(kind, len(rows), [_validity(rows)], children=children)
    if pa.types.is_dictionary(kind):
        return _codes(kind, rows)
    if pa.types.is_boolean(kind):
        values = pa.py_buffer(np.packbits([bool(row) for row in rows], bitorder="little"))
        return pa.Array.from_buffers(kind, len(rows), [_validity(rows), values])
    if kind.value_type == FOREIGN:
        return pa.array([None if row is None else list(map(_write_part, row)) for row in rows], kind)
    if kind.value_type in NUMBERS:
        arrays = [_NO_NUMBERS if row is None else NUMBERS[kind.value_type].of(row) for row in rows]
        return _lists(kind, rows, _array(kind.value_type, arrays))
    sets = [_NO_SETS if row is None else row for row in rows]
    counts = np.frombuffer(b"".join([row.counts.data for row in sets]), np.int32)
    tokens = _array(kind.value_type.value_type, [row.tokens for row in sets])
    inner = pa.Array.from_buffers(kind.value_type, len(counts), [None, build_offsets(counts)], children=[tokens])
    return _lists(kind, rows, inner)


def _maps(kind: pa.MapType, rows: Sequence[Mapping[str, float] | None]) -> pa.Array:
    """Build a column of maps from text to float64."""
    keys = _texts([key for row in rows for key in row or ()])
    items = np.array([value for row in rows for value in (row or {}).values()], np.float64)
    values = pa.Array.from_buffers(pa.float64(), len(items), [None, pa.py_buffer(items)])
    pairs = pa.StructArray.from_arrays([keys, values], fields=[kind.key_field, kind.item_field])
    return _lists(kind, rows, pairs)


def _codes(kind: pa.DictionaryType, rows: Sequence[str | None]) -> pa.Array:
    """Build a column of texts in which each different text is stored once."""
    places: dict[str, int] = {}
    numbers = [0 if text is None else places.setdefault(text, len(places)) for text in rows]
    data = pa.py_buffer(np.array(numbers, str(kind.index_type)))
    codes = pa.Array.from_buffers(kind.index_type, len(rows), [_validity(rows), data])
    return pa.DictionaryArray.from_arrays(codes, _texts(list(places)))


def _texts(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    offsets = build_offsets(np.array([len(text) for text in encoded], np.int64))
    return pa.Array.from_buffers(pa.utf8(), len(texts), [None, offsets, pa.py_buffer(b"".join(encoded))])


def _write_part(placed: PlacedPart) -> dict[str, Any]:
    return {"position": placed.position, **asdict(placed.part)}


_NO_NUMBERS, _NO_SETS = Int32s(), TokenSets(Int32s(), Int32s())


def _lists(kind: pa.DataType, rows: Sequence[Any], values: pa.Array) -> pa.Array:
    """Build an Arrow column of lists; None becomes a null."""
    lengths = [0 if row is None else len(row) for row in rows]
    return pa.Array.from_buffers(
        kind, len(rows), [_validity(rows), build_offsets(np.array(lengths, np.int64))], children=[values]
    )


def _validity(rows: Sequence[Any]) -> pa.Buffer:
    """Return Arrow's bitmap of the rows that have a value."""
    return pa.py_buffer(np.packbits([row is not None for row in rows], bitorder="little"))


def _array(kind: pa.DataType, arrays: Iterable[TokenArray[Any]]) -> pa.Array:
    data = b"".join([array.data for array in arrays])
    return pa.Array.from_buffers(kind, len(data) // NUMBERS[kind].size, [None, pa.py_buffer(data)])


def _parts(column: pa.Array) -> list[pa.Array]:
    """Return the child arrays of an Arrow column, without the elements that belong to null values."""
    if pa.types.is_map(column.type):
        return [column.items]
    if pa.types.is_list(column.type):
        return [column.flatten()]
    return column.filter(column.is_valid()).flatten() if pa.types.is_struct(column.type) else []
