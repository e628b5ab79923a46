"""Formation: decides whether a batch is formed now or waits for a group. The methods of `Formation` change no state.

A batch is formed as soon as forming it preempts no running group, or else when the learner is ready for the batch. In
the second case a running group that would be too old for the next batch is preempted and issued again, unless the batch
has to wait for the group. A group that a batch has to wait for is called *awaited*: with `on_stale = "wait"` every
group, otherwise the group of a prompt that was preempted often (see `issue_order`).
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
    """The decision and the state on which it depends: the groups in the buffer and the running groups."""

    limits: RolloutLimits
    buffer: TrajectoryBuffer
    starts: RunningByVersion

    def oldest_allowed(self, number: int) -> float:
        """Compute the oldest version under which a group of batch `number` may have started."""
        return number - self.limits.async_ratio

    @property
    def is_full(self) -> bool:
        """True if the buffer holds enough groups for a batch."""
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
        # Only as many later batches matter as the running groups can fill.
        filled = (self.starts.count_before(math.inf) - 1) // self.limits.groups
        reached = min(math.floor(self.limits.async_ratio) - 1, filled)
        return any(self._crowds(number, later) for later in range(1, reached + 1))

    def _crowds(self, number: int, later: int) -> bool:
        """Return whether old groups would have to be dropped if batch `number` was formed now.

        Old groups have to be dropped if the batch takes younger groups while more old groups run than the next `later`
        batches can hold.
        """
        bound, groups = self.oldest_allowed(number + 1 + later), self.limits.groups
        return self.starts.count_before(bound) > later * groups and self.buffer.count_older(bound) < groups

    def _has_room_for_awaited(self, bound: float) -> bool:
        """Return whether the batch would take an awaited running group that started before `bound`.

        More groups than the batch holds may have started before `bound`. The awaited group with the smallest rank
        decides: if the batch has no room for this group, the batch has no room for any other awaited group. The method
        runs after every group that ends, so it does not search for this group if the group's version alone decides.
        """
        groups, version = self.limits.groups, self.starts.find_oldest_awaited(bound)
        if version is None or self.buffer.count_older(version) >= groups:
            return False
        if self.buffer.count_ahead(Rank(version, True, FIRST)) < groups:
            return True
        return self.buffer.count_ahead(Rank(version, False, self.starts.find_first_awaited(version))) < groups
