"""Defines an index of the running groups of responses by the policy version under which they started.

A query costs O(versions) instead of O(groups), because the scheduler queries the index after each group.
"""

from __future__ import annotations

from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.group import GroupRollout


class RunningByVersion:
    """An index of the running groups of responses that were not preempted, by policy version."""

    def __init__(self) -> None:
        self._versions: dict[GroupRollout, int] = {}
        # policy version -> its running groups, in the order of their start
        self._running: dict[int, dict[GroupRollout, None]] = {}
        self._awaited: dict[int, int] = {}  # policy version -> number of groups that a batch waits for

    def add(self, version: int, rollout: GroupRollout) -> None:
        """Add a group of responses that started, or started again, under this policy version."""
        self.remove(rollout)
        self._versions[rollout] = version
        self._running.setdefault(version, {})[rollout] = None
        self._awaited[version] = self._awaited.get(version, 0) + rollout.awaited

    def remove(self, rollout: GroupRollout) -> None:
        """Remove a group of responses that ended or was preempted; ignore an unknown group."""
        version = self._versions.pop(rollout, None)
        if version is not None:
            del self._running[version][rollout]
            self._awaited[version] -= rollout.awaited
            if not self._running[version]:
                del self._running[version], self._awaited[version]

    def count_before(self, bound: float) -> int:
        """Count the running groups of responses that started under a policy version older than `bound`."""
        return sum(len(running) for version, running in self._running.items() if version < bound)

    def list_before(self, bound: float) -> list[GroupRollout]:
        """List the running groups of responses that started under a policy version older than `bound`."""
        return [rollout for version, running in self._running.items() if version < bound for rollout in running]

    def find_oldest_awaited(self, bound: float) -> int | None:
        """Find the oldest policy version before `bound` of a running group that a batch waits for, or return None."""
        return min((version for version, count in self._awaited.items() if count and version < bound), default=None)

    def find_first_awaited(self, version: int) -> GroupKey:
        """Find the smallest key of the groups of this policy version that a batch waits for."""
        return min(rollout.key for rollout in self._running[version] if rollout.awaited)
