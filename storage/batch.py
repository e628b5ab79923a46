"""TrajectoryBatch: an immutable Arrow table of trajectory groups; the unit of storage and of a train step.

One row is one trajectory. Rows of a group stand together; groups keep the order they were given. The Arrow
*file* format is used (a truncated stream can read without error, a truncated file cannot). Reads are
zero-copy: columns are views of the buffer the batch was opened from.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rollflow.storage.errors import Corrupt
from rollflow.storage.records import Ending, GroupKey, Trajectory, TrajectoryGroup

SCHEMA_VERSION = 1

SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.utf8(), nullable=False),
        pa.field("domain", pa.utf8(), nullable=False),
        pa.field("started_version", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("reason", pa.utf8(), nullable=False),
        pa.field("ending", pa.utf8(), nullable=False),
        pa.field("generation_seconds", pa.float32(), nullable=False),
        pa.field("reward_seconds", pa.float32(), nullable=False),
    ],
    metadata={b"rollflow.schema": str(SCHEMA_VERSION).encode()},
)

CODES = {pa.int32(): "i", pa.float32(): "f"}  # of `struct`


@dataclass(frozen=True)
class TrajectoryBatch:
    """Groups as one Arrow table with `SCHEMA`."""

    table: pa.Table

    @classmethod
    def from_groups(cls, groups: Sequence[TrajectoryGroup]) -> TrajectoryBatch:
        """The table of R rows for R trajectories; groups that are packed already are not copied."""
        if groups and all(group.table is not None for group in groups):
            return cls(pa.concat_tables([group.table for group in groups]))
        return cls(_table(groups))

    def to_bytes(self) -> pa.Buffer:
        """The Arrow IPC file of this batch."""
        whole = self.table.combine_chunks()
        measure = pa.MockOutputStream()
        _write(measure, whole)
        data = pa.allocate_buffer(measure.size())  # a stream that grows would copy it again and again
        _write(pa.FixedSizeBufferWriter(data), whole)
        return data

    @classmethod
    def from_bytes(cls, data: bytes | pa.Buffer) -> TrajectoryBatch:
        """Open an Arrow IPC file without copying it.

        Raises:
            Corrupt: it is no Arrow file, its schema is not the one this version writes, or its columns are damaged.
        """
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise Corrupt(f"not a readable Arrow file: {error}") from error
        found = (table.schema.metadata or {}).get(b"rollflow.schema", b"none").decode(errors="replace")
        if found != str(SCHEMA_VERSION):
            raise Corrupt(f"trajectory schema {found} is not {SCHEMA_VERSION}, the one this version of rollflow reads")
        if not table.schema.equals(SCHEMA):
            raise Corrupt(f"the columns are not those of trajectory schema {SCHEMA_VERSION}")
        if any(column.null_count for column in table.columns):
            raise Corrupt("a column holds nulls")
        return cls(table)

    def __len__(self) -> int:
        """Trajectories in the batch."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[GroupKey]:
        """The dispatches in the batch, in order, each once."""
        pairs = zip(self.table["index"].to_pylist(), self.table["attempt"].to_pylist(), strict=True)
        return [GroupKey(*pair) for pair, _ in groupby(pairs)]

    def response_tokens(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Tokens the policy chose, for each group; `sizes` are the groups' rows."""
        mask = self.table["loss_mask"].combine_chunks()
        before = np.cumsum([0, *sizes])[:-1]
        chosen = np.concatenate([[0], np.cumsum(mask.flatten().to_numpy(zero_copy_only=False))])
        of_rows = np.diff(chosen[mask.offsets.to_numpy()])
        return tuple(np.add.reduceat(of_rows, before).tolist()) if len(of_rows) else ()

    def groups(self) -> list[TrajectoryGroup]:
        """The groups as records (copies; for tools and tests, the learner reads columns)."""
        rows = self.table.to_pylist()
        found = []
        for key, members in groupby(rows, key=lambda r: GroupKey(r["index"], r["attempt"])):
            group = list(members)
            found.append(
                TrajectoryGroup(key, group[0]["prompt_id"], group[0]["domain"], tuple(_trajectory(r) for r in group))
            )
        return found


def _write(sink: pa.NativeFile, table: pa.Table) -> None:
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(table)


def packed(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with its rows as Arrow: made when it is complete, so that a commit only has to join tables."""
    return group if group.table is not None else replace(group, table=_table([group]))


def _table(groups: Sequence[TrajectoryGroup]) -> pa.Table:
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    same: dict[str, list[Any]] = {
        "index": [g.key.prompt for g in groups for _ in g.trajectories],
        "attempt": [g.key.attempt for g in groups for _ in g.trajectories],
        "prompt_id": [g.prompt_id for g in groups for _ in g.trajectories],
        "domain": [g.domain for g in groups for _ in g.trajectories],
    }

    def column(field: pa.Field) -> pa.Array:
        values: list[Any] = same.get(field.name) or list(map(attrgetter(field.name), rows))
        return _lists(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)

    return pa.table([column(field) for field in SCHEMA], schema=SCHEMA)


def _lists(rows: Sequence[Sequence[float]], kind: pa.ListType) -> pa.Array:
    """A column of lists; packing them in C takes half the time of Arrow's own reading of tuples."""
    offsets = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    if kind.value_type == pa.bool_():
        values = pa.array(np.frombuffer(b"".join(map(bytes, rows)), np.bool_))  # type: ignore[arg-type]
    else:
        code = CODES[kind.value_type]
        data = b"".join([_packer(len(row), code)(*row) for row in rows])
        values = pa.Array.from_buffers(kind.value_type, len(data) // 4, [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(offsets, values, type=kind)


@cache
def _packer(count: int, code: str) -> Callable[..., bytes]:
    return struct.Struct(f"{count}{code}").pack


def _trajectory(row: dict[str, object]) -> Trajectory:
    """One row of `SCHEMA` as a record."""
    fields = {k: v for k, v in row.items() if k not in ("index", "attempt", "prompt_id", "domain")}
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        fields[name] = tuple(fields[name])  # type: ignore[arg-type]
    fields["ending"] = Ending(str(fields["ending"]))
    return Trajectory(**fields)  # type: ignore[arg-type]
