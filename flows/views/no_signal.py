"""Finds versions in which nothing was learned: no row of the version's batch had an advantage, so no reward moved the
weights.

The module reads each version's metrics from the run's log, so that a resumed run, a summary and a live view show the
same counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rollflow.storage.policies import PolicyVersion

CAUSE = (
    "all responses to each prompt had equal rewards, so every advantage was 0; check the rewards "
    "(`rollflow inspect`), or choose easier or harder prompts"
)


def lacks_signal(version: PolicyVersion) -> bool:
    """Return whether no reward moved the weights of a version; return False for old records, whose metrics lack the
    figure.
    """
    return version.number > 0 and version.metrics.get("rows_with_signal", 1.0) == 0.0


def count_without_signal(versions: Iterable[PolicyVersion]) -> int:
    """Count the versions that lack a signal."""
    return sum(map(lacks_signal, versions))


def count_newest_without(versions: Sequence[PolicyVersion]) -> int:
    """Count the versions without a signal after the last version with a signal."""
    return sum(1 for _ in takewhile(lacks_signal, reversed(versions)))


def describe_no_signal(newest: int, count: int) -> str:
    """Say in one sentence that the newest `count` versions lack a signal."""
    return f"versions {newest - count + 1} to {newest} learned nothing: {CAUSE}"
