"""Runs for an audit, and what it finds in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollflow.storage.log.audit import audit
from rollflow.storage.log.entries import BatchCommitted, RunCreated, VersionPublished
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import TrajectoryGroup
from tests.support.log_actors import GROUPS
from tests.support.log_runs import Actors, committed, published

VERSIONS, ALPHA = 6, 3.0


def lagging(store: ObjectStore) -> Actors:
    """Six versions and a batch that waits, formed one ahead; groups are committed a version after they were started."""
    actors = Actors.begin(store, alpha=ALPHA)
    actors.ahead()
    started(actors, 0)
    for version in range(VERSIONS):
        started(actors, version)
        actors.train()
    return actors


def started(actors: Actors, version: int) -> None:
    """A batch's groups run."""
    for _ in range(GROUPS):
        actors.scheduler.dispatch(version)


def found(run: ObjectStore) -> set[tuple[str, str]]:
    """Kind and path of all violations, which an audit from the first entry and a later one agree on."""
    violations = audit(run, deep=True).violations
    assert audit(run).violations == violations
    return {(violation.kind, violation.where) for violation in violations}


def file_of(run: ObjectStore, number: int) -> str:
    """Where the file of a batch lies."""
    body = committed(run, number).body
    assert isinstance(body, BatchCommitted)
    return body.file.path


def weights_of(run: ObjectStore, version: int) -> str:
    """Where the weights of a version lie."""
    body = published(run, version).body
    assert isinstance(body, VersionPublished)
    return body.weights[0].path


def other_alpha(body: RunCreated, alpha: float) -> RunCreated:
    """The run's first entry, with another bound of staleness than the one that is hashed."""
    return replace(body, config={**body.config, "async_ratio": alpha})


def of_first(group: TrajectoryGroup, **change: object) -> TrajectoryGroup:
    """The group with its first trajectory changed."""
    first = replace(group.trajectories[0], **change)  # type: ignore[arg-type]
    return replace(group, trajectories=(first, *group.trajectories[1:]))


class Watched(MemoryStore):
    """Calls `before` with the path of every read."""

    def get(self, path: str) -> bytes:
        WATCHING[self.name](path)
        return super().get(path)


WATCHING: dict[str, Callable[[str], object]] = {}
