"""Computes from a run's log for how long the run was paused, stopped or down between two policy versions.

A pause begins with the last batch or policy version before a new supervisor's log entry. A pause ends when the last
stage has taken its role again. The time of work that a stopped stage had not finished is counted as pause, because the
log does not show this work. The restart of a single stage is not a pause. The time to compute the pauses grows with the
number of restarts only, because no other log entries are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollflow.storage.log.entries import BatchCommitted, Claimed, VersionPublished
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.run.context import RunContext


def paused_seconds(context: RunContext, first: PolicyVersion, last: PolicyVersion) -> float:
    """Return the total length in seconds of the pauses between two published policy versions."""
    return sum(_sum_pauses(context, before, after) for before, after in _find_reclaimed(context, first, last))


def _find_reclaimed(
    context: RunContext, first: PolicyVersion, last: PolicyVersion
) -> Iterator[tuple[PolicyVersion, PolicyVersion]]:
    """Yield each pair of consecutive policy versions that were published by different learners, because the learner was
    restarted between them. Bisection finds the pairs, because a replaced learner never publishes again.
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
    """Return the total length in seconds of the pauses between two consecutive policy versions."""
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
