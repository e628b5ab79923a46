"""Decides whether a training batch is formed now or waits for a running group of responses.

While the learner is busy, a batch is formed only if no running group of responses has to be preempted (cancelled and
started again later) for the batch. Once the learner needs the batch, running groups of responses that would be too old
for the next batch are preempted. A batch never preempts a group of responses that is *awaited*: the batch waits for the
group. With `on_stale = "wait"`, a batch waits for every running group of responses that would be too old for the batch
after it. With `on_stale = "drop"`, a batch waits only for groups of responses whose prompts were preempted often (see
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

FIRST = GroupKey(-1, -1)  # sorts before the key of every group of responses


@dataclass(frozen=True, slots=True)
class Formation:
    """Decides when a training batch is formed, from the groups of responses that are buffered and running."""

    limits: RolloutLimits
    buffer: TrajectoryBuffer
    starts: RunningByVersion

    def oldest_allowed(self, number: int) -> float:
        """Compute the oldest policy version under which a group of responses for batch `number` may have started."""
        return number - self.limits.async_ratio

    @property
    def is_full(self) -> bool:
        """True if the buffer has enough groups of responses for a training batch."""
        return len(self.buffer) >= self.limits.groups

    def must_wait(self, number: int, running: Iterable[int], *, learner_is_busy: bool, is_lost: bool) -> bool:
        """Return whether training batch `number` has to wait for a running group of responses.

        While the learner trains, the batch also waits for every running group of responses that would be too old for
        the next batch.

        Args:
            running: start numbers of the running groups that were not preempted, in ascending order.
            is_lost: True if the batch was voided (rejected) when later batches were formed already.
        """
        if self.limits.batch_order == "started":
            first = next(iter(running), None)
            return first is not None and self.buffer.count_before(first) < self.limits.groups
        bound = self.oldest_allowed(number + 1)
        if self.starts.count_before(bound) if learner_is_busy else self._has_room_for_awaited(bound):
            return True
        if self.limits.on_stale == "drop" or is_lost:
            return False
        # Only the batches that the running groups of responses can fill have to be checked.
        filled = (self.starts.count_before(math.inf) - 1) // self.limits.groups
        reached = min(math.floor(self.limits.async_ratio) - 1, filled)
        return any(self._crowds(number, later) for later in range(1, reached + 1))

    def _crowds(self, number: int, later: int) -> bool:
        """Return whether old groups of responses would have to be dropped later if batch `number` were formed now.

        Old groups are dropped if the batch takes younger groups while more old groups run than the next `later` batches
        can take.
        """
        bound, groups = self.oldest_allowed(number + 1 + later), self.limits.groups
        return self.starts.count_before(bound) > later * groups and self.buffer.count_older(bound) < groups

    def _has_room_for_awaited(self, bound: float) -> bool:
        """Return whether the batch would include a running group of responses that the batch has to wait for."""
        groups, version = self.limits.groups, self.starts.find_oldest_awaited(bound)
        if version is None or self.buffer.count_older(version) >= groups:
            return False
        if self.buffer.count_ahead(Rank(version, True, FIRST)) < groups:
            return True
        return self.buffer.count_ahead(Rank(version, False, self.starts.find_first_awaited(version))) < groups
