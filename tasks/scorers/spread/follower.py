"""Decides how many reward actors or environment actors a run needs, from the number of responses or episodes.

    all through the last `grow_seconds`, more actors were needed than run    -> the smallest number needed in this time
    all through the last `idle_seconds`, fewer actors were needed than run   -> the largest number needed in this time

A short burst starts no actor, and a short pause ends none.
"""

from __future__ import annotations

from collections import deque


class QueueFollower:
    """Decides the number of actors."""

    def __init__(self, least: int, most: int, grow_seconds: float, idle_seconds: float) -> None:
        self._least, self._most = least, most
        self._grow_seconds, self._idle_seconds = grow_seconds, idle_seconds
        self.count = least
        self._seen = deque[tuple[float, int]]()  # pairs of a time and the number of actors that were needed then

    def decide(self, now: float, wanted: int) -> int:
        """Return the number of actors that the run should have now.

        Args:
            now: time in seconds, of any clock that never goes back.
            wanted: number of actors that the present responses or episodes would fill.
        """
        wanted = min(max(wanted, self._least), self._most)
        self._seen.append((now, wanted))
        oldest = now - max(self._grow_seconds, self._idle_seconds)
        while len(self._seen) > 1 and self._seen[1][0] <= oldest:
            self._seen.popleft()
        if (busy := self._list_since(now - self._grow_seconds)) and min(busy) > self.count:
            self.count = min(busy)
        elif (quiet := self._list_since(now - self._idle_seconds)) and max(quiet) < self.count:
            self.count = max(quiet)
        return self.count

    def _list_since(self, begin: float) -> list[int]:
        """Return the numbers that were needed since `begin`; return [] if nothing was recorded before `begin`."""
        if self._seen[0][0] > begin:
            return []
        first = max(time for time, _ in self._seen if time <= begin)
        return [wanted for time, wanted in self._seen if time >= first]
