"""An immutable Arrow table of trajectory groups: the unit of storage and of a train step.

One row is one trajectory. The rows of a group are adjacent, and groups keep their order. Batches are written in Arrow's
*file* format: a truncated file always fails to open, while a truncated stream may not. Reads are zero-copy: the columns
are views of the buffer from which the batch was opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from rollflow.storage.arrow_rows import join_rows, parts_of
from rollflow.storage.errors import Corrupt
from rollflow.storage.records import FinishedGroup, GroupKey, PackedGroup, StopReason, Trajectory, TrajectoryGroup

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


@dataclass(frozen=True)
class TrajectoryBatch:
    """A batch of groups as one Arrow table with `SCHEMA`."""

    table: pa.Table

    @classmethod
    def from_groups(cls, groups: Sequence[FinishedGroup]) -> TrajectoryBatch:
        """Build the table: one row per trajectory."""
        packs = [group.parts if isinstance(group, PackedGroup) else parts_of([group], SCHEMA) for group in groups]
        return cls(join_rows(packs or [parts_of([], SCHEMA)], SCHEMA))

    def to_pieces(self) -> list[memoryview]:
        """Return the Arrow IPC file of this batch as its headers and views of its columns, in file order."""
        pieces = _Pieces()
        with pa.ipc.new_file(pa.PythonFile(pieces, mode="w"), SCHEMA) as writer:
            writer.write_table(self.table.combine_chunks())
        return pieces.found

    def to_bytes(self) -> pa.Buffer:
        """Return the Arrow IPC file of this batch as one buffer."""
        return pa.py_buffer(b"".join(self.to_pieces()))

    @classmethod
    def from_bytes(cls, data: bytes | pa.Buffer) -> TrajectoryBatch:
        """Open an Arrow IPC file without copying it.

        Raises:
            Corrupt: the bytes are no Arrow file, the schema is not `SCHEMA`, or a column is damaged.
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
        """Return the number of trajectories."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[GroupKey]:
        """The keys of the batch's dispatches, in order and without repetition."""
        pairs = zip(self.table["index"].to_pylist(), self.table["attempt"].to_pylist(), strict=True)
        return [GroupKey(*pair) for pair, _ in groupby(pairs)]

    @property
    def domains(self) -> Counter[str]:
        """The number of groups per domain."""
        pairs = zip(self.table["index"].to_pylist(), self.table["attempt"].to_pylist(), strict=True)
        return Counter(dict(zip(pairs, self.table["domain"].to_pylist(), strict=True)).values())

    def groups(self) -> list[TrajectoryGroup]:
        """Return the groups as records. This method copies all data, so only tools and tests use it."""
        rows = self.table.to_pylist()
        found = []
        for key, members in groupby(rows, key=lambda r: GroupKey(r["index"], r["attempt"])):
            group = list(members)
            found.append(
                TrajectoryGroup(key, group[0]["prompt_id"], group[0]["domain"], tuple(_trajectory(r) for r in group))
            )
        return found


class _Pieces:
    """A file-like sink that keeps the buffers that Arrow writes, without copying them."""

    closed = False

    def __init__(self) -> None:
        self.found: list[memoryview] = []

    def write(self, piece: bytes | pa.Buffer) -> None:
        self.found.append(memoryview(piece))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def pack_group(group: TrajectoryGroup) -> PackedGroup:
    """Convert the rows of a complete group to columns, so that a commit only has to join columns."""
    counts = group.started_version, group.newest_version, group.response_tokens, group.surplus_tokens
    return PackedGroup(group.key, parts_of([group], SCHEMA), *counts)


def _trajectory(row: dict[str, object]) -> Trajectory:
    """Convert one row of `SCHEMA` to a record."""
    fields = {k: v for k, v in row.items() if k not in ("index", "attempt", "prompt_id", "domain")}
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        fields[name] = tuple(fields[name])  # type: ignore[arg-type]
    fields["ending"] = StopReason(str(fields["ending"]))
    return Trajectory(**fields)  # type: ignore[arg-type]
