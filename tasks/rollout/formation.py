"""Formation: decides whether a batch is formed now or waits for a group. The methods of `Formation` change no state.

While the learner is busy, a batch is formed only if no running group has to be preempted for it. Once the learner is
ready for the batch, a running group that would be too old for the next batch is preempted and issued again, unless the
batch has to wait for the group. A group that a batch has to wait for is called *awaited*. With `on_stale = "wait"`
every group is awaited. With `on_stale = "drop"` only the groups of prompts that were preempted often are awaited (see
`issue_order`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.buffer import Rank, TrajectoryBuffer
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.running_by_version import RunningByVersion

FIRST = GroupKey(-1, -1)  # a key that sorts before the key of every group


@dataclass(frozen=True, slots=True)
class Formation:
    """Decides when a batch is formed, from the groups in the buffer and the running groups."""

    limits: RolloutLimits
    buffer: TrajectoryBuffer
    starts: RunningByVersion

    def oldest_allowed(self, number: int) -> float:
        """Compute the oldest version under which a group of batch `number` may have started."""
        return number - self.limits.async_ratio

    @property
    def is_full(self) -> bool:
        """True if the buffer has enough groups for a batch."""
        return len(self.buffer) >= self.limits.groups

    def must_wait(self, number: int, running: Iterable[int], *, learner_is_busy: bool, is_lost: bool) -> bool:
        """Return whether batch `number` has to wait for a running group.

        While the learner is busy, the batch waits for every group that would be too old for the next batch, because
        forming a batch early must preempt no group.

        Args:
            running: issue numbers of the running groups that were not preempted, in ascending order.
            is_lost: the batch was voided, and later batches are formed already.
        """
        if self.limits.batch_order == "started":
            first = next(iter(running), None)
            return first is not None and self.buffer.count_before(first) < self.limits.groups
        bound = self.oldest_allowed(number + 1)
        if self.starts.count_before(bound) if learner_is_busy else self._has_room_for_awaited(bound):
            return True
        if self.limits.on_stale == "drop" or is_lost:
            return False
        # Only the later batches that the running groups can fill have to be checked.
        filled = (self.starts.count_before(math.inf) - 1) // self.limits.groups
        reached = min(math.floor(self.limits.async_ratio) - 1, filled)
        return any(self._crowds(number, later) for later in range(1, reached + 1))

    def _crowds(self, number: int, later: int) -> bool:
        """Return whether old groups would have to be dropped if batch `number` was formed now.

        Old groups have to be dropped if the batch takes younger groups while more old groups run than fit into the next
        `later` batches.
        """
        bound, groups = self.oldest_allowed(number + 1 + later), self.limits.groups
        return self.starts.count_before(bound) > later * groups and self.buffer.count_older(bound) < groups

    def _has_room_for_awaited(self, bound: float) -> bool:
        """Return whether the batch would take an awaited running group that started under a version older than `bound`.

        More groups than fit into the batch may have started under versions older than `bound`. If the batch has no room
        for the awaited group with the smallest rank, it has no room for any other awaited group. The method runs after
        every group that ends, so it searches for the awaited group with the smallest rank only if that group's version
        does not already decide.
        """
        groups, version = self.limits.groups, self.starts.find_oldest_awaited(bound)
        if version is None or self.buffer.count_older(version) >= groups:
            return False
        if self.buffer.count_ahead(Rank(version, True, FIRST)) < groups:
            return True
        return self.buffer.count_ahead(Rank(version, False, self.starts.find_first_awaited(version))) < groups
