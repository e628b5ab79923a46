"""The trajectory store: batch b, once committed, is the batch that trains version b into version b + 1.

A commit has two writes: the Arrow file under a name of its own, then the atomic create of `trajectories/<b>.json`,
which names the file, its rows, bytes and sha256. Before the second write nothing happened; after it the batch exists
for ever. Two schedulers cannot both commit batch b: the second gets `Conflict`.

The commit also remembers the rollout side at that moment: the prompt sources' cursors, the dispatches still in flight
and the ones discarded since the commit before. A restarted scheduler continues from the newest commit alone.

A batch whose file or commit cannot be read any more is quarantined by a *void*, `trajectories/voids/<n>.json`, which
names it and says why; nothing is deleted. Then the batch is formed anew as its next *edition*,
`trajectories/<b>.<edition>.json`. The edition that counts is the first one that is neither voided nor empty (an empty
commit settles voids, see `settlement`). What is said here of batch b is meant of that edition.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Conflict, Corrupt, Missing, Stale
from rollflow.storage.objects.base import ObjectStore, first_missing
from rollflow.storage.objects.disk import found
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey, TrajectoryGroup

COMMIT_SCHEMA = 3  # of a batch commit; its file has one of its own
READABLE = (2, 3)  # 2 did not count how often a prompt was left behind


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Groups chosen for batch `number`, not yet durable. `cursor`, `in_flight`, `discards` are of one moment."""

    number: int
    groups: tuple[TrajectoryGroup, ...]
    cursor: Cursor
    in_flight: tuple[GroupKey, ...]
    discards: tuple[Discard, ...]
    edition: int = 0
    order: int = 0  # commits of the run before this one
    voids: int = 0  # voids its scheduler knows to be settled
    behind: tuple[tuple[int, int], ...] = ()  # prompts in flight that were left behind, and how often
    issued: tuple[int, ...] = ()  # prompts that were dispatched for the first time since the batch before, in order

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
    """The durable record of one edition of batch `number`; without groups, it only settles voids."""

    number: int
    edition: int
    order: int
    voids: int
    file: str
    rows: int
    size: int  # bytes
    sha256: str
    groups: tuple[GroupKey, ...]
    started_versions: tuple[int, ...]
    response_tokens: tuple[int, ...]
    cursor: Cursor
    in_flight: tuple[GroupKey, ...]
    discards: tuple[Discard, ...]
    writer: str
    surplus_tokens: int = 0  # of responses that were started beyond what the groups needed
    behind: tuple[tuple[int, int], ...] = ()  # prompts in flight that were left behind, and how often

    @property
    def path(self) -> str:
        """Where it lies."""
        return commit_path(self.number, self.edition)

    def to_json(self) -> bytes:
        """The object that is committed."""
        body: dict[str, Any] = {"schema": COMMIT_SCHEMA, **{name: getattr(self, name) for name in self.__slots__}}
        body["cursor"] = asdict(self.cursor)
        body["discards"] = [[*d.key, d.reason.value, d.started_version, d.response_tokens] for d in self.discards]
        return _sealed(body)

    @classmethod
    def from_json(cls, data: bytes, name: str) -> BatchCommit:
        """Parse a commit; `Corrupt` if it is not one this version reads."""
        try:
            body = _opened(data)
            if body.pop("schema") not in READABLE:
                raise Corrupt(f"{name} was written by another version of rollflow; use that one to read it")
            body["groups"] = tuple(GroupKey(*k) for k in body["groups"])
            body["cursor"] = Cursor.of(body["cursor"])
            body["in_flight"] = tuple(GroupKey(*k) for k in body["in_flight"])
            body["behind"] = tuple((prompt, times) for prompt, times in body.get("behind", ()))
            body["started_versions"] = tuple(body["started_versions"])
            body["response_tokens"] = tuple(body["response_tokens"])
            body["discards"] = tuple(
                Discard(GroupKey(i, a), DiscardReason(why), started, tokens)
                for i, a, why, started, tokens in body["discards"]
            )
            record = cls(**body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"{name} is not a batch commit: {error}") from error
        if record.path != name:
            raise Corrupt(f"{name} is the commit {record.path}, under another name")
        return record


@dataclass(frozen=True, slots=True)
class Void:
    """Edition `edition` of batch `batch` is not to be used: `file` is not what was committed."""

    batch: int
    edition: int
    file: str
    reason: str
    writer: str
    at: float  # seconds since the epoch

    def to_json(self) -> bytes:
        """The object that is created."""
        return _sealed(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Void:
        """Parse a void. One that cannot be read voids nothing: who meets the damaged batch voids it again."""
        try:
            return cls(**_opened(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(-1, 0, name, f"not a void: {error}", "", 0.0)


def _sealed(body: dict[str, Any]) -> bytes:
    """JSON that can tell whether it was altered: its last member is the sha256 of the others."""
    plain = json.dumps(body)
    return f'{plain[:-1]}, "seal": "{_seal(plain)}"}}'.encode()


def _opened(data: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(data)
    if body.pop("seal") != _seal(json.dumps(body)):
        raise ValueError("it was altered")
    return body


def _seal(plain: str) -> str:
    return hashlib.sha256(plain.encode()).hexdigest()


def commit_path(number: int, edition: int = 0) -> str:
    """Where an edition of batch `number` is committed."""
    return f"trajectories/{number:08d}.json" if edition == 0 else f"trajectories/{number:08d}.{edition}.json"


def void_path(number: int) -> str:
    """Where void `number` lies."""
    return f"trajectories/voids/{number:08d}.json"


def committed_editions(run: ObjectStore) -> list[tuple[int, int]]:
    """(batch number, edition) of every commit in storage, sorted; lists, so it is for audits and settlements."""
    found = (re.fullmatch(r"trajectories/(\d{8})(?:\.(\d+))?\.json", path) for path in run.list("trajectories"))
    return sorted((int(match[1]), int(match[2] or 0)) for match in found if match)


class TrajectoryStore:
    """Commits and reads trajectory batches of one run. See the module's docstring for the guarantees."""

    def __init__(self, run: ObjectStore, writer: str | None = None) -> None:
        self.run = run
        self.writer = writer or uuid.uuid4().hex[:12]
        self._voids: dict[int, Void] = {}

    def commit(self, staged: StagedBatch, async_ratio: float) -> tuple[BatchCommit, pa.Buffer]:
        """Make a staged batch durable; returns its record and the bytes of its file.

        Raises:
            Stale: a group is too old for this batch.
            Conflict: this edition of the batch was committed by another writer.
        """
        staged.check_fresh(async_ratio)
        batch = TrajectoryBatch.from_groups(staged.groups)
        pieces = batch.to_pieces()
        # A name of this very call: a repeated one must not touch what the first may have committed.
        file = f"trajectories/{staged.number:08d}-{self.writer}-{uuid.uuid4().hex[:8]}.arrow"
        draft = BatchCommit(
            number=staged.number,
            edition=staged.edition,
            order=staged.order,
            voids=staged.voids,
            file=file,
            rows=len(batch),
            size=sum(map(len, pieces)),
            sha256="",  # until the pieces are hashed, while they are written
            groups=tuple(g.key for g in staged.groups),
            started_versions=tuple(g.started_version for g in staged.groups),
            response_tokens=tuple(g.response_tokens for g in staged.groups),
            surplus_tokens=sum(g.surplus_tokens for g in staged.groups),
            cursor=staged.cursor,
            in_flight=staged.in_flight,
            discards=staged.discards,
            behind=staged.behind,
            writer=self.writer,
        )
        sha256 = self.run.create_naming(draft.path, lambda found: replace(draft, sha256=found).to_json(), file, pieces)
        return replace(draft, sha256=sha256), self._bytes(file, pieces)

    def _bytes(self, file: str, pieces: Iterable[memoryview]) -> pa.Buffer:
        """What was just written to `file`: mapped where it lies on this machine, else joined."""
        local = self.run.local_path(file)
        return pa.memory_map(str(local)).read_buffer() if local else pa.py_buffer(b"".join(pieces))

    def committed(self, number: int) -> bool:
        """Whether batch `number` exists."""
        return self.current_edition(number) is not None

    def current_edition(self, number: int) -> int | None:
        """The edition of batch `number` that counts, None if it is not committed."""
        edition = self.edition(number)
        return edition if self.run.exists(commit_path(number, edition)) else None

    def edition(self, number: int, voids: int | None = None) -> int:
        """The edition of batch `number` that counts, committed or not; `voids`: as the first so many voids have it."""
        known = self.voids()[:voids]
        gone = {void.edition for void in known if void.batch == number}
        edition = 0
        while known and (edition in gone or self._empty(number, edition)):
            edition += 1
        return edition

    def record(self, number: int) -> BatchCommit:
        """The commit of batch `number`; `Missing` if there is none, `Corrupt` if it cannot be read."""
        return self.record_of(number, self.edition(number))

    def record_of(self, number: int, edition: int) -> BatchCommit:
        """The commit of one edition, whether it counts or not; raises as `record`."""
        path = commit_path(number, edition)
        return BatchCommit.from_json(self.run.get(path), path)

    def commit_sha256(self, number: int) -> str:
        """What the manifest of version `number` + 1 names as its batch."""
        return hashlib.sha256(self.run.get(commit_path(number, self.edition(number)))).hexdigest()

    def discards(self, record: BatchCommit) -> tuple[Discard, ...]:
        """What was discarded with batch `record.number`: by this commit and by the editions before it."""
        found: list[Discard] = []
        for edition in range(record.edition):
            try:
                found += self.record_of(record.number, edition).discards
            except Corrupt:
                continue  # the settlement of its void discarded again what it named
        return (*found, *record.discards)

    def read(self, number: int) -> tuple[BatchCommit, pa.Buffer]:
        """A committed batch, its bytes checked against the commit.

        Raises:
            Missing: no such commit.
            Corrupt: the file is gone or is not what was committed.
        """
        record = self.record(number)
        return record, verified(self.run, record)

    @staticmethod
    def verify(record: BatchCommit, data: bytes | pa.Buffer) -> None:
        """Raise `Corrupt` unless `data` is, byte for byte, what was committed."""
        if len(memoryview(data)) != record.size or hashlib.sha256(data).hexdigest() != record.sha256:
            raise Corrupt(f"{record.file} is not what batch {record.number} committed (sha256 or size differs)")

    def next_number(self, start: int = 0) -> int:
        """The first batch number at or after `start` that was never committed (probing, never listing)."""
        return first_missing(self.run, commit_path, start)

    def voids(self) -> list[Void]:
        """Every void of the run, oldest first; one probe where there is no new one."""
        while self.run.exists(path := void_path(len(self._voids))):
            self._voids[len(self._voids)] = Void.from_json(self.run.get(path), path)
        return [self._voids[number] for number in sorted(self._voids)]

    def voided(self) -> int:
        """How many voids there are: a scheduler begins again when there is a new one."""
        return len(self.voids())

    def void(self, number: int, reason: str) -> None:
        """Quarantine batch `number`, if it cannot be read: it is formed anew. May be repeated, by anybody."""
        while True:
            known = len(self.voids())
            edition = self.edition(number, known)
            file = self._damaged(number, edition)
            if file is None:
                return
            void = Void(number, edition, file, reason, self.writer, time.time())
            try:
                self.run.create(void_path(known), void.to_json())
            except Conflict:
                continue  # another void took the number, perhaps this very one

    def _damaged(self, number: int, edition: int) -> str | None:
        """The object of a committed batch that is not what it should be; None if there is none, or no batch."""
        try:
            record = self.record_of(number, edition)
        except Missing:
            return None
        except Corrupt:
            return commit_path(number, edition)
        try:
            TrajectoryBatch.from_bytes(verified(self.run, record))
        except Corrupt:
            return record.file
        return None

    def _empty(self, number: int, edition: int) -> bool:
        try:
            return not self.record_of(number, edition).groups
        except (Missing, Corrupt):
            return False


def verified(run: ObjectStore, record: BatchCommit) -> pa.Buffer:
    """The bytes of a commit's file, or `Corrupt` with the file's name; `Unreachable` if it cannot be read now."""
    try:
        data = _bytes_of(run, record.file)
    except Missing as error:
        raise Corrupt(f"{record.file}, committed as batch {record.number}, is missing") from error
    TrajectoryStore.verify(record, data)
    return data


def _bytes_of(run: ObjectStore, path: str) -> pa.Buffer:
    """An object's bytes: mapped where it lies on this machine, but for an empty one, which cannot be."""
    local = run.local_path(path)
    if local is None or run.stat(path).size == 0:
        return pa.py_buffer(run.get(path))
    with found(local):
        return pa.memory_map(str(local)).read_buffer()
