"""Computes from a run's log how long the run was paused, stopped or down between two versions.

When a run is resumed, a new supervisor claims its role, and then the stages claim theirs. A pause begins with the last
batch or version before the new supervisor. A pause ends with the last claim of a stage before the next batch or
version. The time of unfinished work of stopped stages counts as pause, because the log does not show it. A restart of
one stage alone is no pause.

Only log entries between versions with different claims are read, so the cost grows with the number of claims.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollflow.storage.log.entries import BatchCommitted, Claimed, VersionPublished
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.run.context import RunContext


def paused_seconds(context: RunContext, first: PolicyVersion, last: PolicyVersion) -> float:
    """Return the total seconds of pauses between two published versions."""
    return sum(_sum_pauses(context, before, after) for before, after in _find_reclaimed(context, first, last))


def _find_reclaimed(
    context: RunContext, first: PolicyVersion, last: PolicyVersion
) -> Iterator[tuple[PolicyVersion, PolicyVersion]]:
    """Yield each pair of consecutive versions that were published under different claims; bisection finds them, because
    a lost claim never comes back.
    """
    if first.number >= last.number or first.claim == last.claim:
        return
    if last.number == first.number + 1:
        yield first, last
        return
    middle = context.policies.find((first.number + last.number) // 2)
    yield from _find_reclaimed(context, first, middle)
    yield from _find_reclaimed(context, middle, last)


def _sum_pauses(context: RunContext, before: PolicyVersion, after: PolicyVersion) -> float:
    """Return the total seconds of pauses between two consecutive versions."""
    total, worked, claimed = 0.0, before.at, None
    resumed = False
    for record in iterate_written(context.log, before.entry + 1, after.entry):
        entry = record.entry
        match entry.body:
            case Claimed():
                resumed = resumed or entry.role == "supervisor"
                if resumed and entry.role != "supervisor":
                    claimed = entry.at
            case BatchCommitted() | VersionPublished():
                total += max(0.0, claimed - worked) if claimed is not None else 0.0
                worked, claimed, resumed = entry.at, None, False
    return total
