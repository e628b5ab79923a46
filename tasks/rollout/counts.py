"""The scheduler's counters, for people and for MLflow: no decision depends on the counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stopwatch:
    """Measures the total number of seconds for which a condition held."""

    seconds: float = 0.0
    since: float | None = None

    def note(self, now: float, *, holds: bool) -> None:
        """Note whether the condition holds from now on."""
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if holds else None


@dataclass(slots=True)
class SchedulerCounts:
    """The counters of a scheduler since it started."""

    tokens: int = 0
    surplus_tokens: int = 0  # tokens of responses that were started in addition to the G of a group
    discarded_tokens: int = 0
    dropped_tokens: int = 0  # discarded tokens of groups that were too slow or not needed
    trajectories: int = 0
    discards: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)  # reason for filtering -> number of groups
    held: Stopwatch = field(
        default_factory=Stopwatch
    )  # time in which engines had free slots, but alpha allowed no new group
    waited: Stopwatch = field(default_factory=Stopwatch)  # time in which the learner was idle while a full batch waited
