"""Defines counters of the rollout scheduler, for users and MLflow; the scheduler itself does not read the counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stopwatch:
    """Measures the total time in which a condition was true, in seconds."""

    seconds: float = 0.0
    since: float | None = None

    def note(self, now: float, *, holds: bool) -> None:
        """Record whether the measured condition is true from now on."""
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if holds else None


@dataclass(slots=True)
class SchedulerCounts:
    """The counters of a rollout scheduler, since the scheduler started."""

    tokens: int = 0
    surplus_tokens: int = 0  # number of tokens in surplus responses, which were generated in addition to `group_size`
    discarded_tokens: int = 0
    dropped_tokens: int = 0  # number of tokens in discarded groups of responses that were too slow or not needed
    trajectories: int = 0
    discards: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)  # reason for filtering -> number of groups of responses
    held: Stopwatch = field(
        default_factory=Stopwatch
    )  # time in which engines had free slots, but the staleness limit allowed no new group of responses
    # time in which the learner was idle while the buffer had a full batch
    waited: Stopwatch = field(default_factory=Stopwatch)
    # time in which `max_unscored` alone kept new groups of responses from starting
    backlogged: Stopwatch = field(default_factory=Stopwatch)
