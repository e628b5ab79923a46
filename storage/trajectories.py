"""The trajectory store: batch b, once committed, is the batch that trains version b into version b + 1.

A commit has two writes: the Arrow file under a name of its writer's own, then the atomic create of
`trajectories/<b>.json`, which names the file, its rows, bytes and sha256. Before the second write nothing
happened; after it the batch exists for ever. Two schedulers cannot both commit batch b: the second gets
`Conflict`.

The commit also remembers the rollout side at that moment: the prompt cursor, the dispatches still in flight
and the ones discarded since the batch before. A restarted scheduler continues from the newest commit alone.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollflow.storage.batch import SCHEMA_VERSION, TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing, Stale
from rollflow.storage.objects.base import ObjectStore, first_missing
from rollflow.storage.records import Discard, DiscardReason, GroupKey, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Groups chosen for batch `number`, not yet durable. `cursor` is the next prompt index never dispatched."""

    number: int
    groups: tuple[TrajectoryGroup, ...]
    cursor: int
    in_flight: tuple[GroupKey, ...]
    discards: tuple[Discard, ...]

    def check_fresh(self, async_ratio: float) -> None:
        """Raise `Stale` if any group is older than version `number` - alpha (invariant 1)."""
        for group in self.groups:
            if group.started_version < self.number - async_ratio:
                raise Stale(
                    f"group {group.key} was started under version {group.started_version}, batch {self.number} "
                    f"allows {self.number - async_ratio} at async_ratio {async_ratio}"
                )


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """The durable record of batch `number`."""

    number: int
    file: str
    rows: int
    size: int  # bytes
    sha256: str
    groups: tuple[GroupKey, ...]
    started_versions: tuple[int, ...]
    response_tokens: tuple[int, ...]
    cursor: int
    in_flight: tuple[GroupKey, ...]
    discards: tuple[Discard, ...]
    writer: str

    def to_json(self) -> bytes:
        """The object that is committed."""
        body: dict[str, Any] = {"schema": SCHEMA_VERSION, **{name: getattr(self, name) for name in self.__slots__}}
        body["discards"] = [[*d.key, d.reason.value, d.started_version, d.response_tokens] for d in self.discards]
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, name: str) -> BatchCommit:
        """Parse a commit; `Corrupt` if it is not one this version reads."""
        try:
            body = json.loads(data)
            if body.pop("schema") != SCHEMA_VERSION:
                raise Corrupt(f"{name} was written by another version of rollflow; use that one to read it")
            body["groups"] = tuple(GroupKey(*k) for k in body["groups"])
            body["in_flight"] = tuple(GroupKey(*k) for k in body["in_flight"])
            body["started_versions"] = tuple(body["started_versions"])
            body["response_tokens"] = tuple(body["response_tokens"])
            body["discards"] = tuple(
                Discard(GroupKey(i, a), DiscardReason(why), started, tokens)
                for i, a, why, started, tokens in body["discards"]
            )
            return cls(**body)
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{name} is not a batch commit: {error}") from error


def commit_path(number: int) -> str:
    """Where the commit of batch `number` lies."""
    return f"trajectories/{number:08d}.json"


class TrajectoryStore:
    """Commits and reads trajectory batches of one run. See the module's docstring for the guarantees."""

    def __init__(self, run: ObjectStore, writer: str | None = None) -> None:
        self.run = run
        self.writer = writer or uuid.uuid4().hex[:12]

    def commit(self, staged: StagedBatch, async_ratio: float) -> tuple[BatchCommit, pa.Buffer]:
        """Make a staged batch durable; returns its record and the bytes of its file.

        Raises:
            Stale: a group is too old for this batch.
            Conflict: batch `number` was committed by another writer.
        """
        staged.check_fresh(async_ratio)
        batch = TrajectoryBatch.from_groups(staged.groups)
        data = batch.to_bytes()
        record = BatchCommit(
            number=staged.number,
            file=f"trajectories/{staged.number:08d}-{self.writer}.arrow",
            rows=len(batch),
            size=data.size,
            sha256=hashlib.sha256(data).hexdigest(),
            groups=tuple(g.key for g in staged.groups),
            started_versions=tuple(g.started_version for g in staged.groups),
            response_tokens=tuple(g.response_tokens for g in staged.groups),
            cursor=staged.cursor,
            in_flight=staged.in_flight,
            discards=staged.discards,
            writer=self.writer,
        )
        self.run.put(record.file, memoryview(data))
        self.run.create(commit_path(staged.number), record.to_json())
        return record, data

    def committed(self, number: int) -> bool:
        """Whether batch `number` exists."""
        return self.run.exists(commit_path(number))

    def record(self, number: int) -> BatchCommit:
        """The commit of batch `number`; `Missing` if there is none, `Corrupt` if it cannot be read."""
        path = commit_path(number)
        return BatchCommit.from_json(self.run.get(path), path)

    def read(self, number: int) -> tuple[BatchCommit, pa.Buffer]:
        """A committed batch, its bytes checked against the commit.

        Raises:
            Missing: no such commit.
            Corrupt: the file is gone or is not what was committed.
        """
        record = self.record(number)
        return record, verified(self.run, record)

    def next_number(self, start: int = 0) -> int:
        """The first batch number at or after `start` that is not committed (probing, never listing)."""
        return first_missing(self.run, commit_path, start)


def verified(run: ObjectStore, record: BatchCommit) -> pa.Buffer:
    """The bytes of a commit's file, or `Corrupt` with the file's name."""
    local = run.local_path(record.file)
    try:
        data = pa.memory_map(str(local)).read_buffer() if local else pa.py_buffer(run.get(record.file))
    except (Missing, OSError) as error:
        raise Corrupt(f"{record.file}, committed as batch {record.number}, is missing") from error
    if data.size != record.size or hashlib.sha256(data).hexdigest() != record.sha256:
        raise Corrupt(f"{record.file} is not what batch {record.number} committed (sha256 or size differs)")
    return data
