"""Builds runs in the trajectory store and the policy store: batches as a scheduler forms them, versions as a learner
publishes them.
"""

from __future__ import annotations

import hashlib
import json

from rollflow.storage.log.entries import RunCreated, VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    GroupKey,
    StopReason,
    StoredObject,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore

SIZE = 2  # the number of trajectories in a group
TURN = 3  # the number of prompts issued with each batch: two become its groups, one is preempted


def begin(run: ObjectStore, async_ratio: float = 0.0, sources: int = 1, **kept: int) -> None:
    """Create a run and claim the supervisor's role; `kept` are the run's retention rules."""
    config = {"async_ratio": async_ratio, "group_size": SIZE, "store": kept}
    log, sha256 = Log(run), hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    log.create(RunCreated("test", config, sha256, sources))
    log.claim("supervisor")


def scheduling(run: ObjectStore) -> tuple[TrajectoryStore, Writer]:
    """Open the run, and claim the scheduler's role."""
    log = Log(run)
    return TrajectoryStore(log), log.claim("scheduler")


def learning(run: ObjectStore) -> tuple[PolicyStore, Writer]:
    """Open the run, and claim the learner's role."""
    log = Log(run)
    return PolicyStore(log), log.claim("learner")


def group(prompt: int, started: int = 0, attempt: int = 0) -> TrajectoryGroup:
    """Build a group of two trajectories with two tokens each, all of version `started`."""
    made = tuple(
        Trajectory(
            s,
            started,
            (1, 2, 3),
            (False, True, True),
            (0.0, -0.5, -0.25),
            (-1, started, started),
            s,
            "r",
            StopReason.STOP,
        )
        for s in range(SIZE)
    )
    return TrajectoryGroup(GroupKey(prompt, attempt), f"p{prompt}", "test", made)


def staged(number: int = 0, started: int = 0, attempt: int = 0) -> StagedBatch:
    """Build batch `number` of a run that forms batches in order from one source.

    `attempt` is above 0 for reissued groups.
    """
    first = TURN * number
    groups = group(first, started, attempt), group(first + 1, started, attempt)
    if attempt:
        return StagedBatch(number, groups)
    left = Discard(GroupKey(first + 2, 0), DiscardReason.STALE, started, 12)
    return StagedBatch(number, groups, (first, first + 1, first + 2), (left,))


def publish(policies: PolicyStore, writer: Writer, number: int | None = None) -> PolicyVersion:
    """Publish version `number`, by default the next version, on its waiting batch. The weights contain the version's
    number.
    """
    version = policies.newest() + 1 if number is None else number
    state = policies.log.state
    weights = policies.stage(writer, version, {"weights/model.safetensors": f"{version} by {writer.claim}".encode()})
    stored = state.retention.stores_state(version)
    kept = policies.stage(writer, version, {"learner/state.safetensors": b"state %d" % version} if stored else {})
    batch = state.waiting[version - 1].entry if version else None
    return policies.publish(writer, VersionPublished(version, batch, weights, kept))


def train(run: ObjectStore, versions: int, *, prune: bool = False) -> tuple[PolicyStore, Writer]:
    """Publish this many more versions, including version 0, each on its own batch. A new scheduler and a new learner do
    the work.
    """
    (batches, scheduler), (policies, learner) = scheduling(run), learning(run)
    for number in range(policies.newest() + 1, policies.newest() + 1 + versions):
        if number and batches.find_waiting(number - 1) is None:
            batches.commit(scheduler, staged(number - 1, number - 1))
        policies.newest()
        publish(policies, learner, number)
        if prune:
            policies.prune(learner)
    return policies, learner


def ready(run: ObjectStore, async_ratio: float = 0.0, sources: int = 1) -> tuple[TrajectoryStore, Writer]:
    """Create a run with version 0, and open it as a scheduler."""
    begin(run, async_ratio, sources)
    train(run, 1)
    return scheduling(run)


def file_of(batches: TrajectoryStore, number: int) -> StoredObject:
    """Return the file of a waiting batch."""
    waiting = batches.find_waiting(number)
    assert waiting is not None
    return waiting.file
