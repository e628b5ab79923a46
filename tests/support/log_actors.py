"""Plays the roles of a run (supervisor, scheduler, learner) on its log, without engines and training. Each role opens
the log by itself. To kill a role, a test drops the object.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.configs import diff_trees, recorded_configs
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Body,
    ConfigChanged,
    Entry,
    EpochStarted,
    Pruned,
    RunCreated,
    TrainedGroup,
    VersionPublished,
)
from rollflow.storage.log.run_log import AttachedObject, Log, Writer
from rollflow.storage.log.state import NOBODY, RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    GroupKey,
    StopReason,
    StoredObject,
    Trajectory,
    TrajectoryGroup,
)

SHARES = (2, 1)  # the number of prompts issued from each source in turn
GROUPS, SIZE = 2, 3
TOKENS = 7  # the number of tokens of a group
QUESTIONS = 3  # the number of questions of a source that skips solved questions


def create_run(store: ObjectStore, alpha: float = 2.0, solved_every: int = 1, **kept: int) -> None:
    """Build entry 0. With `solved_every` above 1, the second source skips solved questions."""
    config = {"async_ratio": alpha, "group_size": SIZE, "store": {"keep_last": 2, "keep_every": 4, **kept}}
    if solved_every > 1:
        config["prompts"] = [{}, {"solved_every": solved_every}]
    Log(store).create(RunCreated("test", config, "0" * 64, len(SHARES)))


def trajectories(group: TrainedGroup) -> TrajectoryGroup:
    """Build the log's description of a group from samples; the first sample is the oldest."""
    split = [TOKENS // SIZE + (place < TOKENS % SIZE) for place in range(SIZE)]
    samples = tuple(
        Trajectory(
            sample,
            group.newest if sample else group.started,
            (1,) * (count + 1),
            (False,) + (True,) * count,
            (0.0,) + (-0.5,) * count,
            (-1,) + (group.newest,) * count,
            1.0,
            "right",
            StopReason.STOP,
        )
        for sample, count in enumerate(split)
    )
    return TrajectoryGroup(group.key, f"p{group.prompt}", "test", samples)


def stored(store: ObjectStore, path: str, data: bytes) -> StoredObject:
    """Put an object and describe it."""
    return StoredObject(path, len(data), store.put(path, data))


@dataclass
class Supervisor:
    """A supervisor, which appends its claim to the run's log."""

    store: ObjectStore
    log: Log = field(init=False)
    writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.log = Log(self.store)
        self.writer = self.log.claim("supervisor", who="a supervisor")

    def change(self, **given: Any) -> Entry:
        """Change the config for all later entries. A given section replaces the old section as a whole."""

        def body(state: RunState, _: object) -> Body:
            before = recorded_configs(self.log)[-1].config
            config = {**before, **given}
            told = json.dumps(config, sort_keys=True).encode()
            changes = diff_trees(before, config)
            return ConfigChanged(state.version + 1, config, hashlib.sha256(told).hexdigest(), changes, "a person")

        return self.writer.append(body)


@dataclass
class Scheduler:
    """A scheduler that issues prompts and commits batches from its own state, and starts again when a batch was voided
    (revoked).
    """

    store: ObjectStore
    under: int
    arrow: bool = False  # true: batches are real files
    log: Log = field(init=False)
    writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.log = Log(self.store)
        self.writer = self.log.claim("scheduler", self.under)
        self.begin()

    def begin(self) -> None:
        """Start from the state of the log only."""
        state = self.log.state
        self.voids, self.number = state.voids, state.next_batch
        self.holes = deque(state.holes)
        self.counts = list(state.issued)
        self.waits = deque(state.in_flight)
        self.running: list[tuple[GroupKey, int]] = []  # (dispatch, the version under which it was started)
        self.issued: list[int] = []
        self.discards: list[Discard] = []

    def dispatch(self, version: int) -> GroupKey:
        """Start one group."""
        if self.waits:
            key = self.waits.popleft()
        else:
            may = [s for s in range(len(SHARES)) if self.counts[s] < self._find_end(s)]
            source = min(may, key=lambda s: self.counts[s] / SHARES[s])
            key = GroupKey(self.counts[source] * len(SHARES) + source, 0)
            self.counts[source] += 1
            self.issued.append(key.prompt)
        self.running.append((key, version))
        return key

    def _find_end(self, source: int) -> float:
        """Return how many prompts of a source the epochs that this scheduler knows contain."""
        epoch = self.log.state.epochs.get(source)
        return math.inf if epoch is None else epoch.end

    def start_epoch(self, source: int, skipped: int = 0) -> Entry:
        """Start the source's next epoch, which skips the first `skipped` questions. The first epoch skips no
        question.
        """

        def body(state: RunState, _: object) -> Body:
            last = state.epochs[source]
            if last.entry == NOBODY:
                return EpochStarted(source, 0, 0, QUESTIONS)
            left_out = tuple(range(min(skipped, QUESTIONS)))
            return EpochStarted(source, last.number + 1, last.end, QUESTIONS - len(left_out), left_out, last.entry)

        return self.writer.append(body)

    def discard(self, place: int, reason: DiscardReason, tokens: int = 5) -> None:
        """Preempt a running group."""
        key, started = self.running.pop(place)
        self.discards.append(Discard(key, reason, started, tokens))
        if reason.issued_again:
            self.waits.append(GroupKey(key.prompt, key.attempt + 1))

    @property
    def next(self) -> int:
        """Number of the next batch."""
        return self.holes[0] if self.holes else self.number

    def commit(self, surplus: int = 0) -> Entry:
        """Form a batch from the fresh groups, and discard the stale ones."""
        number, state = self.next, self.log.state
        for place in reversed(range(len(self.running))):
            if self.running[place][1] < number - state.alpha:
                self.discard(place, DiscardReason.STALE)
        while len(self.running) < GROUPS:
            self.dispatch(state.version)
        taken = self.running[:GROUPS]
        groups = tuple(TrainedGroup(*key, started, max(started, state.version), TOKENS) for key, started in taken)
        data = self._file(number, groups)
        path = f"trajectories/{number:08d}-{self.writer.claim}-{uuid.uuid4().hex[:8]}.arrow"
        issued, discards = tuple(self.issued), tuple(self.discards)

        def body(state: RunState, file: StoredObject | None) -> Body:
            assert file is not None
            return BatchCommitted(number, file, SIZE * GROUPS, groups, issued, discards, surplus)

        entry = self.writer.append(body, AttachedObject(path, data))
        self.running = self.running[GROUPS:]
        self.issued, self.discards = [], []
        if self.holes:
            self.holes.popleft()
        else:
            self.number += 1
        if self.log.state.voids > self.voids:
            self.begin()
        return entry

    def _file(self, number: int, groups: tuple[TrainedGroup, ...]) -> bytes:
        if self.arrow:
            return bytes(TrajectoryBatch.from_groups([trajectories(group) for group in groups]).to_bytes())
        return f"batch {number} of {groups} {uuid.uuid4().hex}".encode()


@dataclass
class Learner:
    """A learner that publishes versions, voids batches that it cannot read, and prunes objects that need not be
    kept.
    """

    store: ObjectStore
    under: int
    log: Log = field(init=False)
    writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.log = Log(self.store)
        self.writer = self.log.claim("learner", self.under)

    def publish(self) -> Entry:
        """Publish the next version. Its batch must be a waiting batch in the state that this learner has read."""
        state = self.log.state
        number = state.version + 1
        batch = state.waiting[number - 1].entry if number else None
        weights = self._object(number, "weights")
        with_state = state.retention.stores_state(number)
        states = (self._object(number, "state"),) if with_state else ()
        return self.writer.append(lambda state, _: VersionPublished(number, batch, (weights,), states))

    def void(self, number: int, cause: Literal["damaged", "not-finite"] = "damaged") -> Entry:
        """Void a waiting batch."""
        entry = self.log.state.waiting[number].entry
        return self.writer.append(lambda state, _: BatchVoided(number, entry, cause, cause))

    def prune(self, most: int | None = None) -> Entry:
        """Prune the objects that no version needs, or only the oldest of them."""
        objects = tuple(self.log.state.releasable)[:most]
        return self.writer.append(lambda state, _: Pruned(objects))

    def _object(self, number: int, kind: str) -> StoredObject:
        path = f"policies/{number:08d}/{self.writer.claim}/{kind}.safetensors"
        return stored(self.store, path, f"{kind} {number}".encode())


def entries(store: ObjectStore) -> Sequence[bytes]:
    """Return the bytes of every entry, by name."""
    return [store.get(path) for path in store.list("log")]


def chained(data: Sequence[bytes]) -> bool:
    """Return whether each entry names the hash of its predecessor."""
    hashes = ["", *(hashlib.sha256(one).hexdigest() for one in data)]
    return all(json.loads(one)["prev"] == hashes[n] for n, one in enumerate(data))
