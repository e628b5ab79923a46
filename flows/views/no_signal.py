"""Finds versions in which nothing was learned: no row of the batch had an advantage, so no reward changed the weights.

The metrics come from the run's log, so that a live view, a summary and a resumed run show the same counts.
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
    """Return whether a version has no learning signal; return False for versions of older runs, which did not record
    it.
    """
    return version.number > 0 and version.metrics.get("rows_with_signal", 1.0) == 0.0


def count_without_signal(versions: Iterable[PolicyVersion]) -> int:
    """Count the versions without a learning signal."""
    return sum(map(lacks_signal, versions))


def count_newest_without(versions: Sequence[PolicyVersion]) -> int:
    """Count the newest versions without a learning signal, back to the last version with one."""
    return sum(1 for _ in takewhile(lacks_signal, reversed(versions)))


def describe_no_signal(newest: int, count: int) -> str:
    """Return a sentence that says that the newest `count` versions have no learning signal."""
    return f"versions {newest - count + 1} to {newest} learned nothing: {CAUSE}"
