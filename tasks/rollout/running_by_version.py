"""The running dispatches by the policy version they were started under. The scheduler asks for them after every group.

Versions are few and dispatches many. So a frequent question costs O(versions), not O(dispatches).
"""

from __future__ import annotations

from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.group import GroupRollout


class Starts:
    """Dispatches that run and were not given up."""

    def __init__(self) -> None:
        self._versions: dict[GroupRollout, int] = {}
        self._running: dict[int, dict[GroupRollout, None]] = {}  # by version, in the order they were started
        self._awaited: dict[int, int] = {}  # how many of them a batch waits for

    def add(self, version: int, rollout: GroupRollout) -> None:
        """Add a dispatch that was started under this version; one that is there was started again."""
        self.remove(rollout)
        self._versions[rollout] = version
        self._running.setdefault(version, {})[rollout] = None
        self._awaited[version] = self._awaited.get(version, 0) + rollout.awaited

    def remove(self, rollout: GroupRollout) -> None:
        """Remove a dispatch that ended or was given up; if it is not there, nothing changes."""
        version = self._versions.pop(rollout, None)
        if version is not None:
            del self._running[version][rollout]
            self._awaited[version] -= rollout.awaited
            if not self._running[version]:
                del self._running[version], self._awaited[version]

    def count(self, bound: float) -> int:
        """How many were started under an older version than `bound`."""
        return sum(len(running) for version, running in self._running.items() if version < bound)

    def before(self, bound: float) -> list[GroupRollout]:
        """Those that were started under an older version than `bound`."""
        return [rollout for version, running in self._running.items() if version < bound for rollout in running]

    def oldest_awaited(self, bound: float) -> int | None:
        """The oldest version before `bound` under which an awaited one was started."""
        return min((version for version, count in self._awaited.items() if count and version < bound), default=None)

    def first_awaited(self, version: int) -> GroupKey:
        """Of those awaited ones that were started under this version, the first by key."""
        return min(rollout.key for rollout in self._running[version] if rollout.awaited)
