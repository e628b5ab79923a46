"""Builds runs for tests of the audit, and reads the violations that an audit reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchCommitted, RunCreated, VersionPublished
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import TrajectoryGroup
from tests.support.log_actors import GROUPS
from tests.support.log_runs import Actors, committed, published

VERSIONS, ALPHA = 6, 3.0


def lagging(store: ObjectStore) -> Actors:
    """Make a run of six versions and a waiting batch; every group is committed one version after its start."""
    actors = Actors.begin(store, alpha=ALPHA)
    actors.ahead()
    started(actors, 0)
    for version in range(VERSIONS):
        started(actors, version)
        actors.train()
    return actors


def started(actors: Actors, version: int) -> None:
    """Start the groups of a batch."""
    for _ in range(GROUPS):
        actors.scheduler.dispatch(version)


def found(run: ObjectStore) -> set[tuple[str, str]]:
    """Return the kind and path of all violations. A full audit and an audit that continues from a stored result must
    report the same violations.
    """
    violations = audit(run, deep=True).violations
    assert audit(run).violations == violations
    return {(violation.kind, violation.where) for violation in violations}


def file_of(run: ObjectStore, number: int) -> str:
    """Return the path of a batch's file."""
    body = committed(run, number).body
    assert isinstance(body, BatchCommitted)
    return body.file.path


def weights_of(run: ObjectStore, version: int) -> str:
    """Return the path of a version's weights."""
    body = published(run, version).body
    assert isinstance(body, VersionPublished)
    return body.weights[0].path


def other_alpha(body: RunCreated, alpha: float) -> RunCreated:
    """Return the first entry with an alpha (bound on staleness) that differs from the alpha in the hashed config."""
    return replace(body, config={**body.config, "async_ratio": alpha})


def of_first(group: TrajectoryGroup, **change: object) -> TrajectoryGroup:
    """Return the group with changes to its first trajectory."""
    first = replace(group.trajectories[0], **change)  # type: ignore[arg-type]
    return replace(group, trajectories=(first, *group.trajectories[1:]))


class Watched(MemoryStore):
    """A store that calls `before` with the path of every read."""

    def get(self, path: str) -> bytes:
        WATCHING[self.name](path)
        return super().get(path)


WATCHING: dict[str, Callable[[str], object]] = {}
