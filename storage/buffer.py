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
        self._groups: list[tuple[int, TrajectoryGroup]] = []  # with the number of its issue

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """What is waiting."""
        return tuple(group.key for _, group in self._groups)

    def add(self, group: TrajectoryGroup, issue: int = 0) -> None:
        """Put a scored group in line; it was the `issue`-th to be started."""
        self._groups.append((issue, group))

    def before(self, issue: int) -> int:
        """How many of the groups were started before the `issue`-th."""
        return sum(other < issue for other, _ in self._groups)

    def take(self, count: int, oldest_allowed: float, *, in_order: bool = False) -> Taken:
        """Remove stale groups, then `count` groups if there are so many (else none of them).

        Args:
            in_order: take the first that were issued, whatever version they were started under. Within the batch they
                stand as ever: at alpha = 0 the order of issue may depend on what was filtered when.
        """
        stale = [group for _, group in self._groups if group.started_version < oldest_allowed]
        fresh = [(issue, group) for issue, group in self._groups if group.started_version >= oldest_allowed]
        fresh.sort(key=lambda one: (one[0] if in_order else one[1].started_version, one[1].key))
        taken = fresh[:count] if len(fresh) >= count else []
        self._groups = fresh[len(taken) :]
        chosen = sorted((group for _, group in taken), key=lambda group: (group.started_version, group.key))
        return Taken(tuple(chosen), tuple(stale))
