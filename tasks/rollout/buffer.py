"""The trajectory buffer: stores scored groups of responses until a training batch takes them.

A training batch first takes the groups of responses that started under the oldest policy version. Among groups of
responses with the same policy version, a batch first takes the groups that it has to wait for (see `formation`). Among
the remaining groups of responses with the same policy version, a batch first takes the group with the smallest key.
With `async_ratio = 0`, the choice of groups does not depend on which group finished first, so a run can be repeated
exactly. A group of responses that is too old for the next batch is removed, because later batches need even newer
groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import NamedTuple

from rollflow.storage.records import FinishedGroup, GroupKey


class Rank(NamedTuple):
    """Sort key of a group of responses in the buffer: a batch takes the groups with the smallest ranks first."""

    started_version: int
    passed: bool  # False for groups of responses that a batch has to wait for; False sorts before True
    key: GroupKey


class BufferedGroup(NamedTuple):
    """A scored group of responses in the buffer, with its sort key and its number in the order of starts."""

    rank: Rank
    issue: int
    group: FinishedGroup


class TrajectoryBuffer:
    """The scored groups of responses of one run. The age of a group of responses is the age of its oldest
    trajectory."""

    def __init__(self) -> None:
        self._groups: list[BufferedGroup] = []  # sorted by rank

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: FinishedGroup, issue: int = 0, *, awaited: bool = False) -> None:
        """Add a scored group of responses; the group was the `issue`-th group to start."""
        waiting = BufferedGroup(Rank(group.started_version, not awaited, group.key), issue, group)
        insort(self._groups, waiting, key=attrgetter("rank"))

    def count_before(self, issue: int) -> int:
        """Count the groups of responses in the buffer that started before the `issue`-th group."""
        return sum(waiting.issue < issue for waiting in self._groups)

    def count_older(self, bound: float) -> int:
        """Count the groups of responses in the buffer that started under a policy version older than `bound`."""
        return bisect_left(self._groups, bound, key=lambda waiting: waiting.rank.started_version)

    def count_ahead(self, rank: Rank) -> int:
        """Count the groups of responses in the buffer that a batch takes before a group with this sort key."""
        return bisect_left(self._groups, rank, key=attrgetter("rank"))

    def drop(self, bound: float) -> tuple[FinishedGroup, ...]:
        """Remove and return the groups of responses that started under a policy version older than `bound`."""
        stale = self.count_older(bound)
        dropped, self._groups = self._groups[:stale], self._groups[stale:]
        return tuple(waiting.group for waiting in dropped)

    def take(self, count: int, *, in_order: bool = False) -> tuple[FinishedGroup, ...]:
        """Remove and return the first `count` groups of responses, sorted by policy version and key.

        Args:
            in_order: take the groups that started first, whatever policy version they started under. The returned
                groups are sorted by policy version and key even with `in_order`, so that a synchronous run
                (`async_ratio = 0`) is reproducible.
        """
        line = sorted(self._groups, key=lambda waiting: (waiting.issue, waiting.rank)) if in_order else self._groups
        self._groups = sorted(line[count:], key=attrgetter("rank"))
        taken = (waiting.group for waiting in line[:count])
        return tuple(sorted(taken, key=lambda group: (group.started_version, group.key)))
