"""Finds policy versions in which nothing was learned, because every advantage in the training batch was 0. The metrics
come from the run's log, so that all views show the same counts.
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
    """Return whether a policy version has no learning signal. Return False for policy versions of older releases, which
    did not record the learning signal.
    """
    return version.number > 0 and version.metrics.get("rows_with_signal", 1.0) == 0.0


def count_without_signal(versions: Iterable[PolicyVersion]) -> int:
    """Count the policy versions without a learning signal."""
    return sum(map(lacks_signal, versions))


def count_newest_without(versions: Sequence[PolicyVersion]) -> int:
    """Count how many of the newest policy versions in a row have no learning signal."""
    return sum(1 for _ in takewhile(lacks_signal, reversed(versions)))


def describe_no_signal(newest: int, count: int) -> str:
    """Return a sentence that says that the newest `count` policy versions have no learning signal."""
    return f"versions {newest - count + 1} to {newest} learned nothing: {CAUSE}"
