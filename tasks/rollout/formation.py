"""Formation: decides whether a batch is formed now or waits for a group. Its methods only read the state.

A batch is formed as soon as that preempts no running group, or else when the learner is ready for it. In the second
case a running group that would be too old for the next batch is preempted and issued again, unless it is *awaited*
(`on_stale = "wait"`, or a prompt of a long round).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.buffer import Rank, TrajectoryBuffer
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.running_by_version import RunningByVersion

FIRST = GroupKey(-1, -1)  # sorts before every key


@dataclass(frozen=True, slots=True)
class Formation:
    """The state that the decision depends on: the groups in the buffer and the running groups."""

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

        While the learner is busy, it waits for every group that would be too old for the next batch: forming a batch
        early must preempt no group.

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
        # More later batches than the running groups can fill crowd out nothing.
        filled = (self.starts.count_before(math.inf) - 1) // self.limits.groups
        reached = min(math.floor(self.limits.async_ratio) - 1, filled)
        return any(self._crowds(number, later) for later in range(1, reached + 1))

    def _crowds(self, number: int, later: int) -> bool:
        """Return whether forming batch `number` now would lead to old groups being dropped.

        That is so if the batch would take younger groups while more old groups run than the `later` next batches can
        hold. The last batch that alpha reaches takes whatever there is.
        """
        bound, groups = self.oldest_allowed(number + 1 + later), self.limits.groups
        return self.starts.count_before(bound) > later * groups and self.buffer.count_older(bound) < groups

    def _has_room_for_awaited(self, bound: float) -> bool:
        """Return whether the batch would take an awaited running group that started before `bound`.

        More groups than the batch holds may be that old. So the first awaited group by rank decides: if it has no room,
        no other has. This runs after every group that ends, so the search for that group is skipped where its version
        alone decides.
        """
        groups, version = self.limits.groups, self.starts.find_oldest_awaited(bound)
        if version is None or self.buffer.count_older(version) >= groups:
            return False
        if self.buffer.count_ahead(Rank(version, True, FIRST)) < groups:
            return True
        return self.buffer.count_ahead(Rank(version, False, self.starts.find_first_awaited(version))) < groups
