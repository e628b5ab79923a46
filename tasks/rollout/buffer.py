"""The trajectory buffer: scored groups waiting for their batch. Decides purely, waits for nothing.

The oldest groups go first. Of equally old ones, the awaited go first, because they were left behind before; then prompt
order decides. So when exactly one batch is there (alpha = 0), the choice does not depend on who finished first. A group
that is too old for the batch at hand is stale: for later batches it would be older still.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import NamedTuple

from rollflow.storage.records import FinishedGroup, GroupKey


class Rank(NamedTuple):
    """The order in which groups go into a batch: the smallest first."""

    started_version: int
    passed: bool  # it is not awaited
    key: GroupKey


class Waiting(NamedTuple):
    """A scored group, and the number of its issue."""

    rank: Rank
    issue: int
    group: FinishedGroup


class TrajectoryBuffer:
    """Scored groups of one run. Freshness is per group: its oldest trajectory counts."""

    def __init__(self) -> None:
        self._groups: list[Waiting] = []  # by rank

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: FinishedGroup, issue: int = 0, *, awaited: bool = False) -> None:
        """Put a scored group in line; it was the `issue`-th to be started."""
        waiting = Waiting(Rank(group.started_version, not awaited, group.key), issue, group)
        insort(self._groups, waiting, key=attrgetter("rank"))

    def before(self, issue: int) -> int:
        """How many of the groups were started before the `issue`-th."""
        return sum(waiting.issue < issue for waiting in self._groups)

    def older(self, bound: float) -> int:
        """How many of the groups were started under an older version than `bound`."""
        return bisect_left(self._groups, bound, key=lambda waiting: waiting.rank.started_version)

    def ahead_of(self, rank: Rank) -> int:
        """How many of the groups go before one of this rank."""
        return bisect_left(self._groups, rank, key=attrgetter("rank"))

    def drop(self, bound: float) -> tuple[FinishedGroup, ...]:
        """Remove the groups that were started under an older version than `bound`."""
        stale = self.older(bound)
        dropped, self._groups = self._groups[:stale], self._groups[stale:]
        return tuple(one.group for one in dropped)

    def take(self, count: int, *, in_order: bool = False) -> tuple[FinishedGroup, ...]:
        """Remove the first `count` groups.

        Args:
            in_order: the first that were issued, whatever version they were started under. Within the batch they
                stand as ever: at alpha = 0 the order of issue may depend on what was filtered when.
        """
        line = sorted(self._groups, key=lambda one: (one.issue, one.rank)) if in_order else self._groups
        self._groups = sorted(line[count:], key=attrgetter("rank"))
        return tuple(sorted((one.group for one in line[:count]), key=lambda group: (group.started_version, group.key)))
