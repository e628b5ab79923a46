"""Defines a trajectory batch: an immutable Arrow table of trajectory groups. A batch is stored as one file, and one
train step uses the whole batch.

Each row is one trajectory, and the rows of a group are adjacent. Opening a batch copies nothing: the columns are views
of the file's buffer. Batches are stored in Arrow's file format, because reading a truncated file in this format always
fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollflow.storage import optional_columns
from rollflow.storage.arrow_rows import count_rows, join_rows, parts_of, view_numbers
from rollflow.storage.errors import Corrupt
from rollflow.storage.model_input import PlacedPart
from rollflow.storage.records import FinishedGroup, GroupKey, PackedGroup, StopReason, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s, sum_values

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


def schema_with(names: Collection[str]) -> pa.Schema:
    """Return the Arrow schema of a batch that has the given optional columns; unknown names are ignored."""
    return pa.schema([*SCHEMA, *optional_columns.fields(names)], metadata=SCHEMA.metadata)


@dataclass(frozen=True)
class TrajectoryBatch:
    """A batch of trajectory groups as one Arrow table, whose schema `schema_with` returns."""

    table: pa.Table

    @classmethod
    def from_groups(cls, groups: Sequence[FinishedGroup]) -> TrajectoryBatch:
        """Build the Arrow table of a batch, with one row per trajectory."""
        packs = [(group.parts, group.optional) if isinstance(group, PackedGroup) else _pack(group) for group in groups]
        table = join_rows([parts for parts, _ in packs] or [parts_of([], SCHEMA)], SCHEMA)
        more = optional_columns.join([(count_rows(parts), arrays) for parts, arrays in packs])
        return cls(pa.table([*table.columns, *more.values()], schema=schema_with(more)) if more else table)

    def to_pieces(self) -> list[memoryview]:
        """Return the batch as an Arrow IPC file: a list of buffers in file order, which share the memory of the
        columns."""
        pieces = _Pieces()
        with pa.ipc.new_file(pa.PythonFile(pieces, mode="w"), self.table.schema) as writer:
            writer.write_table(self.table.combine_chunks())
        return pieces.found

    def to_bytes(self) -> pa.Buffer:
        """Return the batch as an Arrow IPC file in one buffer."""
        return pa.py_buffer(b"".join(self.to_pieces()))

    @classmethod
    def from_bytes(cls, data: bytes | pa.Buffer) -> TrajectoryBatch:
        """Open a batch from the bytes of an Arrow IPC file, without copying the bytes.

        Raises:
            Corrupt: the bytes are not an Arrow file, the schema is not that of a batch, or a column is damaged.
        """
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise Corrupt(f"the batch is not a readable Arrow file: {error}") from error
        found = (table.schema.metadata or {}).get(b"rollflow.schema", b"none").decode(errors="replace")
        if found != str(SCHEMA_VERSION):
            raise Corrupt(
                f"the batch was written with trajectory schema {found}, but this version of rollflow reads only "
                f"schema {SCHEMA_VERSION}"
            )
        more = table.schema.names[len(SCHEMA) :]
        if not table.schema.equals(schema_with(more) if more else SCHEMA):
            raise Corrupt(f"the columns of the batch differ from those of trajectory schema {SCHEMA_VERSION}")
        optional = [table[name].combine_chunks() for name in more]
        required = table.columns[: len(SCHEMA)]
        if any(column.null_count for column in required) or any(map(optional_columns.has_inner_nulls, optional)):
            raise Corrupt("a column of the batch contains null values")
        return cls(table)

    def optional(self, name: str) -> pa.Array | None:
        """Return an optional column of the batch, or None if no row of the batch has a value in this column."""
        return self.table[name].combine_chunks() if name in self.table.schema.names else None

    @property
    def left_out(self) -> NDArray[np.bool_]:
        """A mask over the rows of the batch: true if the learner leaves out the row's response because nobody could
        judge it.
        """
        column = self.optional("left_out")
        found = [False] * len(self) if column is None else [bool(value) for value in column.to_pylist()]
        return np.array(found, bool)

    @property
    def judged(self) -> TrajectoryBatch:
        """The rows that the learner trains on: the batch without left-out responses."""
        left_out_R = self.left_out
        if not left_out_R.any():
            return self
        kept = self.table.filter(pa.array(~left_out_R))
        empty = [name for name in kept.schema.names[len(SCHEMA) :] if kept[name].null_count == len(kept)]
        return TrajectoryBatch(kept.drop_columns(empty))

    def __len__(self) -> int:
        """Return the number of trajectories in the batch."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[GroupKey]:
        """The keys of the groups in the batch, in order and without repetition."""
        pairs = zip(self.table["index"].to_pylist(), self.table["attempt"].to_pylist(), strict=True)
        return [GroupKey(*pair) for pair, _ in groupby(pairs)]

    @property
    def domains(self) -> Counter[str]:
        """The number of the batch's groups in each domain."""
        pairs = zip(self.table["index"].to_pylist(), self.table["attempt"].to_pylist(), strict=True)
        return Counter(dict(zip(pairs, self.table["domain"].to_pylist(), strict=True)).values())

    @property
    def branches(self) -> list[bool]:
        """A mask over the rows of the batch, which is true if the row's trajectory branches off another trajectory."""
        column = self.optional("branch")
        return [False] * len(self) if column is None else [*column.is_valid().to_pylist()]

    @property
    def roles(self) -> list[str | None]:
        """The role that the policy played in each row; None for a row without a role."""
        column = self.optional("role")
        return [None] * len(self) if column is None else [*column.to_pylist()]

    @property
    def episodes(self) -> int:
        """The number of episodes in the batch; an episode counts once, no matter how many branches the episode has."""
        return len(self) - sum(self.branches)

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """The index of the first row of the same episode, for each row of the batch."""
        found = np.arange(len(self))
        column = self.optional("branch")
        if column is None:
            return found
        names = [self.table[name].to_pylist() for name in ("index", "attempt", "sample")]
        rows = {name: row for row, name in enumerate(zip(*names, strict=True))}
        for row, branch in enumerate(column.to_pylist()):
            if branch is not None:
                found[row] = found[rows.get((names[0][row], names[1][row], branch["parent"]), row)]
        return found

    @property
    def episode_rows(self) -> NDArray[np.int64]:
        """The index of each episode's first row."""
        return np.flatnonzero(~np.array(self.branches, bool))

    @property
    def episode_rewards(self) -> NDArray[np.float64]:
        """The reward of each episode: the reward of its first row, plus the token rewards of all its rows. In an
        episode with several roles, only token rewards of rows with the first row's role are added.
        """
        rewards: NDArray[np.float64] = view_numbers(self.table["reward"]).astype(np.float64)
        column = self.optional("token_rewards")
        if column is not None:
            roles = self.roles
            for row, (first, values) in enumerate(zip(self.first_rows.tolist(), column.to_pylist(), strict=True)):
                if values is not None and roles[row] == roles[first]:
                    rewards[first] += sum_values(Float32s.of(values))
        return rewards[self.episode_rows]

    @property
    def foreign_parts(self) -> list[tuple[PlacedPart, ...]]:
        """The foreign parts, such as images, of each row."""
        column = self.optional("foreign_parts")
        return [()] * len(self) if column is None else optional_columns.read_parts(column)

    def groups(self) -> list[TrajectoryGroup]:
        """Return the groups as `TrajectoryGroup` objects. The method `groups` copies all data, so only tools and tests
        call it.
        """
        rows = self.table.to_pylist()
        found = []
        for key, members in groupby(rows, key=lambda r: GroupKey(r["index"], r["attempt"])):
            group = list(members)
            found.append(
                TrajectoryGroup(key, group[0]["prompt_id"], group[0]["domain"], tuple(_trajectory(r) for r in group))
            )
        return found


class _Pieces:
    """A file-like object that collects the buffers that Arrow writes, without copying them."""

    closed = False

    def __init__(self) -> None:
        self.found: list[memoryview] = []

    def write(self, piece: bytes | pa.Buffer) -> None:
        self.found.append(memoryview(piece))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def pack_group(group: TrajectoryGroup) -> PackedGroup:
    """Convert the rows of a complete group to columns, so that the commit of a batch has to join only columns."""
    counts = group.started_version, group.newest_version, group.response_tokens, group.surplus_tokens
    parts, arrays = _pack(group)
    return PackedGroup(group.key, parts, *counts, arrays, group.pass_rate, group.left_out)


def _pack(group: TrajectoryGroup) -> tuple[tuple[bytes, ...], optional_columns.Arrays]:
    return parts_of([group], SCHEMA), optional_columns.pack(group.trajectories)


def _trajectory(row: dict[str, Any]) -> Trajectory:
    """Convert one row of a batch to a `Trajectory`."""
    names = [name for name in SCHEMA.names if name not in ("index", "attempt", "prompt_id", "domain")]
    fields = {name: row[name] for name in names}
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        fields[name] = tuple(fields[name])
    fields["ending"] = StopReason(fields["ending"])
    return Trajectory(**fields, **optional_columns.read(row))
