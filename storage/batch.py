"""TrajectoryBatch: an immutable Arrow table of trajectory groups; the unit of storage and of a train step.

One row is one trajectory. Rows of a group stand together; groups keep the order they were given. The Arrow
*file* format is used (a truncated stream can read without error, a truncated file cannot). Reads are
zero-copy: columns are views of the buffer the batch was opened from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

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


@dataclass(frozen=True)
class TrajectoryBatch:
    """Groups as one Arrow table with `SCHEMA`."""

    table: pa.Table

    @classmethod
    def from_groups(cls, groups: Sequence[TrajectoryGroup]) -> TrajectoryBatch:
        """Build the table; R rows for R trajectories."""
        rows = [(g, t) for g in groups for t in g.trajectories]
        columns: dict[str, list[object]] = {
            "index": [g.key.prompt for g, _ in rows],
            "attempt": [g.key.attempt for g, _ in rows],
            "sample": [t.sample for _, t in rows],
            "prompt_id": [g.prompt_id for g, _ in rows],
            "domain": [g.domain for g, _ in rows],
            "started_version": [t.started_version for _, t in rows],
            "tokens": [t.tokens for _, t in rows],
            "loss_mask": [t.loss_mask for _, t in rows],
            "logprobs": [t.logprobs for _, t in rows],
            "versions": [t.versions for _, t in rows],
            "reward": [t.reward for _, t in rows],
            "reason": [t.reason for _, t in rows],
            "ending": [t.ending.value for _, t in rows],
            "generation_seconds": [t.generation_seconds for _, t in rows],
            "reward_seconds": [t.reward_seconds for _, t in rows],
        }
        return cls(pa.table([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA))

    def to_bytes(self) -> pa.Buffer:
        """The Arrow IPC file of this batch."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(self.table.combine_chunks())
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes | pa.Buffer) -> TrajectoryBatch:
        """Open an Arrow IPC file without copying it.

        Raises:
            Corrupt: it is no Arrow file, or its schema is not the one this version writes.
        """
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise Corrupt(f"not a readable Arrow file: {error}") from error
        found = (table.schema.metadata or {}).get(b"rollflow.schema", b"none").decode()
        if found != str(SCHEMA_VERSION) or not table.schema.equals(SCHEMA):
            raise Corrupt(f"trajectory schema {found} is not {SCHEMA_VERSION}, the one this version of rollflow reads")
        return cls(table)

    def __len__(self) -> int:
        """Trajectories in the batch."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[GroupKey]:
        """The dispatches in the batch, in order, each once."""
        pairs = zip(self.table["index"].to_pylist(), self.table["attempt"].to_pylist(), strict=True)
        return [GroupKey(*pair) for pair, _ in groupby(pairs)]

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


def _trajectory(row: dict[str, object]) -> Trajectory:
    """One row of `SCHEMA` as a record."""
    fields = {k: v for k, v in row.items() if k not in ("index", "attempt", "prompt_id", "domain")}
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        fields[name] = tuple(fields[name])  # type: ignore[arg-type]
    fields["ending"] = Ending(str(fields["ending"]))
    return Trajectory(**fields)  # type: ignore[arg-type]
