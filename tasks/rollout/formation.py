"""Formation: whether a batch is formed now, or a group is waited for. Questions to what waits and what runs; none acts.

A batch is formed as soon as that leaves no group behind, and otherwise when the learner is ready for it. Then a group
that would be too old for the next batch is given up and issued again, unless it is *awaited* (`at_bound = "wait"`, or a
prompt of a long round).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.buffer import Rank, TrajectoryBuffer
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.running_by_version import Starts

FIRST = GroupKey(-1, -1)  # before every other


@dataclass(frozen=True, slots=True)
class Formation:
    """What batches are formed of: the groups that wait in the buffer, and those that run."""

    limits: RolloutLimits
    buffer: TrajectoryBuffer
    starts: Starts

    def oldest_allowed(self, number: int) -> float:
        """The oldest version that a group of batch `number` may have been started under."""
        return number - self.limits.async_ratio

    @property
    def is_full(self) -> bool:
        """Whether a batch of groups waits."""
        return len(self.buffer) >= self.limits.groups

    def must_wait(self, number: int, running: Iterable[int], *, learner_is_busy: bool, is_lost: bool) -> bool:
        """Whether a group is still to come that batch `number` may not leave behind.

        While the learner is busy that is any group: a batch that is formed early must cost nobody its place.

        Args:
            running: the groups that run and were not given up, by the number of their issue, in its order.
            is_lost: the batch was lost, and later ones are formed already.
        """
        if self.limits.order == "started":
            first = next(iter(running), None)
            return first is not None and self.buffer.before(first) < self.limits.groups
        bound = self.oldest_allowed(number + 1)
        if self.starts.count(bound) if learner_is_busy else self._has_room_for_awaited(bound):
            return True
        if self.limits.at_bound == "drop" or is_lost:
            return False
        filled = (self.starts.count(math.inf) - 1) // self.limits.groups  # more batches than that crowd nobody
        reached = min(math.floor(self.limits.async_ratio) - 1, filled)
        return any(self._crowds(number, later) for later in range(1, reached + 1))

    def _crowds(self, number: int, later: int) -> bool:
        """Whether this batch would take younger groups while more old ones run than the `later` batches hold that may
        still take those: some would be dropped in the end. The last batch that alpha reaches takes whatever there is.
        """
        bound, groups = self.oldest_allowed(number + 1 + later), self.limits.groups
        return self.starts.count(bound) > later * groups and self.buffer.older(bound) < groups

    def _has_room_for_awaited(self, bound: float) -> bool:
        """Whether the batch would take one that runs and is awaited, of those that were started before `bound`.

        More groups than it holds may have come to the bound at once: the first awaited one by rank has room, or none.
        It is asked after every group that ends, so that one is looked for only where its version does not tell.
        """
        groups, version = self.limits.groups, self.starts.oldest_awaited(bound)
        if version is None or self.buffer.older(version) >= groups:
            return False
        if self.buffer.ahead_of(Rank(version, True, FIRST)) < groups:
            return True
        return self.buffer.ahead_of(Rank(version, False, self.starts.first_awaited(version))) < groups
