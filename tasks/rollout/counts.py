"""What a scheduler counts, for people and for MLflow: nothing is decided by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stopwatch:
    """How long something was so."""

    seconds: float = 0.0
    since: float | None = None

    def note(self, now: float, *, holds: bool) -> None:
        """It is so from now on, or not."""
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if holds else None


@dataclass(slots=True)
class Counts:
    """What a scheduler has done since it started."""

    tokens: int = 0
    surplus_tokens: int = 0  # of responses that were started beyond G
    discarded_tokens: int = 0
    dropped_tokens: int = 0  # of these, because it was too slow or not needed
    trajectories: int = 0
    discards: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)  # by what was wrong with the group
    held: Stopwatch = field(default_factory=Stopwatch)  # engines had free slots, and alpha allowed no more to start
    waited: Stopwatch = field(default_factory=Stopwatch)  # the learner was ready, and a full batch waited at the bound
