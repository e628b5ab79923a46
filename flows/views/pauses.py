"""Computes from the log how long a run was paused, stopped or down between two of its versions.

A resumed run has a new supervisor, under which the stages claim their roles again. The pause lasts from the newest
batch or version before the resumption to the newest of these claims before the next batch or version. Unfinished work
of the stopped stages counts as pause, since the log does not show it. The restart of a single stage causes no pause.

Only entries between versions of different claims are read, so the cost grows with the claims, not with the run.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollflow.storage.log.entries import BatchCommitted, Claimed, VersionPublished
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.run.context import RunContext


def paused_seconds(context: RunContext, first: PolicyVersion, last: PolicyVersion) -> float:
    """Add up the pauses between two published versions of a run."""
    return sum(_sum_pauses(context, before, after) for before, after in _find_reclaimed(context, first, last))


def _find_reclaimed(
    context: RunContext, first: PolicyVersion, last: PolicyVersion
) -> Iterator[tuple[PolicyVersion, PolicyVersion]]:
    """Yield the pairs of consecutive versions that were published under different claims; a lost claim never comes
    back.
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
    """Add up the pauses between two consecutive versions."""
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
