"""Makes runs on a log with real batch files, and forges logs: alters them with or without a new chain of hashes."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Body,
    Claimed,
    Entry,
    RunCreated,
    TrainedGroup,
    VersionPublished,
    decode,
    encode,
    entry_path,
)
from rollflow.storage.log.run_log import AttachedObject, Log
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import GroupKey, StopReason, StoredObject, Trajectory, TrajectoryGroup
from tests.support.log_actors import GROUPS, SHARES, Learner, Scheduler, Supervisor

G = 4  # the number of trajectories in a group
DOMAINS = ("sums", "words")
CACHES = ("log_snapshots", "log_segments", "audits")


def create(store: ObjectStore, alpha: float = 2.0, **more: Any) -> None:
    """Build entry 0, with a config and its hash."""
    kept = {"keep_last": 2, "keep_every": 4}
    config = {"async_ratio": alpha, "group_size": G, "store": kept, "rollout": {"redundant_responses": 0}, **more}
    Log(store).create(RunCreated("test", config, sha256_of(config), len(SHARES)))


def sha256_of(config: object) -> str:
    """Hash a config as a run does."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def group(key: GroupKey, started: int, newest: int) -> TrajectoryGroup:
    """Build four trajectories: three started under `started`, one under `newest`, all with a token of both versions."""
    starts = (started, started, started, newest)
    made = tuple(
        Trajectory(
            s,
            start,
            (1, 2, 3, 4)[: 3 + s % 2],
            (False, True, True, True)[: 3 + s % 2],
            (0.0, -0.5, -0.25, -1.0)[: 3 + s % 2],
            (-1, start, newest, newest)[: 3 + s % 2],
            float(s),
            "right",
            StopReason.STOP,
        )
        for s, start in enumerate(starts)
    )
    return TrajectoryGroup(key, f"p{key.prompt}", DOMAINS[key.prompt % len(SHARES)], made)


def told(group: TrajectoryGroup) -> TrainedGroup:
    """Build an entry's description of a group."""
    versions = [v for t in group.trajectories for v, own in zip(t.versions, t.loss_mask, strict=True) if own]
    started = group.started_version
    return TrainedGroup(*group.key, started, max([started, *versions]), group.response_tokens)


class RealScheduler(Scheduler):
    """A scheduler that commits real batches."""

    def commit(self, surplus: int = 3) -> Entry:
        number, state = self.next, self.log.state
        while len(self.running) < GROUPS:
            self.dispatch(state.version)
        taken = [group(key, started, state.version) for key, started in self.running[:GROUPS]]
        path = f"trajectories/{number:08d}-{self.writer.claim}-{uuid.uuid4().hex[:8]}.arrow"
        told_of, issued, discards = tuple(map(told, taken)), tuple(self.issued), tuple(self.discards)

        def body(state: RunState, file: StoredObject | None) -> Body:
            assert file is not None
            return BatchCommitted(number, file, G * GROUPS, told_of, issued, discards, surplus)

        entry = self.writer.append(body, AttachedObject(path, TrajectoryBatch.from_groups(taken).to_pieces()))
        self.running = self.running[GROUPS:]
        self.issued, self.discards = [], []
        if self.holes:
            self.holes.popleft()
        else:
            self.number += 1
        if self.log.state.voids > self.voids:
            self.begin()
        return entry


@dataclass
class Actors:
    """The actors of a running run."""

    supervisor: Supervisor
    scheduler: RealScheduler
    learner: Learner

    @classmethod
    def begin(cls, store: ObjectStore, alpha: float = 2.0, **more: Any) -> Actors:
        """Start a run with version 0."""
        create(store, alpha, **more)
        supervisor = Supervisor(store)
        claim = supervisor.writer.claim
        actors = cls(supervisor, RealScheduler(store, claim), Learner(store, claim))
        actors.learner.publish()
        return actors

    def ahead(self, batches: int = 1) -> None:
        """Number of waiting batches."""
        self.scheduler.log.follow()
        for _ in range(batches):
            self.scheduler.commit()

    def train(self, versions: int = 1, *, prune: bool = True) -> Actors:
        """Publish this many more versions, each after one more batch."""
        for _ in range(versions):
            self.ahead()
            self.learner.log.follow()
            self.learner.publish()
            if prune and self.learner.log.state.releasable:
                self.prune()
        for log in (self.supervisor.log, self.scheduler.log, self.learner.log):
            log.settle()
        return self

    def prune(self) -> None:
        """Prune the objects that are not needed, and delete them."""
        objects = {(version, kind) for version, kind in self.learner.log.state.releasable}
        store, paths = self.learner.store, []
        for entry in read(store):
            if isinstance(entry.body, VersionPublished):
                own = {"weights": entry.body.weights, "state": entry.body.state}
                paths += [o.path for kind in own for o in own[kind] if (entry.body.number, kind) in objects]
        self.learner.prune()
        for path in paths:
            store.delete(path)


# --- a forger --------------------------------------------------------------------------------------------------


def read(store: ObjectStore) -> list[Entry]:
    """Return the entries by name."""
    return [decode(store.get(path), n, store.get).entry for n, path in enumerate(store.list("log"))]


def of_kind(store: ObjectStore, kind: type) -> list[Entry]:
    """Return the entries with a body of this type."""
    return [entry for entry in read(store) if isinstance(entry.body, kind)]


def committed(store: ObjectStore, number: int) -> Entry:
    """Return the newest entry of batch `number`."""
    return [entry for entry in of_kind(store, BatchCommitted) if _number(entry) == number][-1]


def published(store: ObjectStore, number: int) -> Entry:
    """Return the entry of version `number`."""
    return [entry for entry in of_kind(store, VersionPublished) if _number(entry) == number][-1]


def _number(entry: Entry) -> int:
    assert isinstance(entry.body, BatchCommitted | VersionPublished)
    return entry.body.number


def forget(store: ObjectStore) -> None:
    """Remove snapshots, segments and audits, because they would show the log as it was before."""
    for folder in CACHES:
        for path in list(store.list(folder)):
            store.delete(path)


def resealed(store: ObjectStore, n: int, **changed: Any) -> None:
    """Replace entry `n` by a valid entry."""
    store.put(entry_path(n), encode(replace(read(store)[n], **changed)).data)


def rewritten(store: ObjectStore, entries: list[Entry]) -> None:
    """Replace the log by one with valid numbers, hashes and checksums, without a trace of the old log."""
    for path in list(store.list("log")):
        store.delete(path)
    forget(store)
    prev = ""
    for n, entry in enumerate(entries):
        encoded = encode(replace(entry, n=n, prev=prev))
        if encoded.index is not None:
            store.put(encoded.index.path, encoded.index_data)
        store.put(entry_path(n), encoded.data)
        prev = encoded.sha256


def changed(store: ObjectStore, n: int, change: Callable[[Any], Any]) -> None:
    """Return the log with another body of entry `n`, and with new hashes of all later entries."""
    entries = read(store)
    entries[n] = replace(entries[n], body=change(entries[n].body))
    rewritten(store, entries)


def inserted(store: ObjectStore, at: int, entry: Entry) -> None:
    """Return the log with one more entry at number `at`; later entries and references to them are renumbered."""

    def moved(n: int) -> int:
        return n + (n >= at)

    def named_anew(entry: Entry) -> Entry:
        body = entry.body
        match body:
            case Claimed(under) if under is not None:
                body = replace(body, under=moved(under))
            case BatchVoided():
                body = replace(body, entry=moved(body.entry))
            case VersionPublished(batch_entry=batch) if batch is not None:
                body = replace(body, batch_entry=moved(batch))
        return replace(entry, claim=moved(entry.claim), body=body)

    entries = [named_anew(one) for one in read(store)]
    rewritten(store, [*entries[:at], named_anew(entry), *entries[at:]])


def rebatched(store: ObjectStore, number: int, change: Callable[[list[TrajectoryGroup]], list[TrajectoryGroup]]) -> str:
    """Replace the file of batch `number`, and its name in the log entry. Return the path."""
    entry = committed(store, number)
    assert isinstance(entry.body, BatchCommitted)
    path = entry.body.file.path
    groups = change(TrajectoryBatch.from_bytes(store.get(path)).groups())
    data = TrajectoryBatch.from_groups(groups).to_bytes().to_pybytes()
    file = StoredObject(path, len(data), store.put(path, data))
    changed(store, entry.n, lambda body: replace(body, file=file))
    return path
