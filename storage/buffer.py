"""The trajectory buffer: scored groups waiting for their batch. Decides purely, waits for nothing.

The oldest groups go first, ties in prompt order, so that the choice does not depend on who finished first when
exactly one batch is there (alpha = 0). A group too old for the batch at hand is handed back as stale: with
batches in order it could only become staler.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollflow.storage.records import GroupKey, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Taken:
    """What a batch gets, and what turned out too old for it."""

    groups: tuple[TrajectoryGroup, ...]
    stale: tuple[TrajectoryGroup, ...]


class TrajectoryBuffer:
    """Scored groups of one run. Freshness is per group: its oldest trajectory counts."""

    def __init__(self) -> None:
        self._groups: list[TrajectoryGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """What is waiting."""
        return tuple(g.key for g in self._groups)

    def add(self, group: TrajectoryGroup) -> None:
        """Put a scored group in line."""
        self._groups.append(group)

    def take(self, count: int, oldest_allowed: float) -> Taken:
        """Remove stale groups, then `count` groups if there are so many (else none of them)."""
        stale = [g for g in self._groups if g.started_version < oldest_allowed]
        fresh = [g for g in self._groups if g.started_version >= oldest_allowed]
        fresh.sort(key=lambda g: (g.started_version, g.key))
        taken = fresh[:count] if len(fresh) >= count else []
        self._groups = fresh[len(taken) :]
        return Taken(tuple(taken), tuple(stale))
