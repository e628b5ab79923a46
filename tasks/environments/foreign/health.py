"""Counts the failures in the worker processes of an environment, and decides when the environment is broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.foreign.faults import WorldEnded

COUNTERS = ("episodes", "resets", "steps", "hangs", "kills", "crashes", "failures", "seconds")


class EnvironmentBroken(ConfigError):
    """Raised if too many episodes in a row have failed for reasons that the policy cannot have caused."""


@dataclass(slots=True)
class EnvironmentHealth:
    """Counters of events in one environment since its creation, and the reason of its newest failure.

    A hang is a call that missed its deadline, and a kill is a process that was killed after a hang or an invalid
    answer. A crash is a process that ended by itself. A failure is an episode that cannot be scored, for a reason that
    the policy cannot have caused.

    Episodes that fail at the same time count as one failure in `failures_in_a_row`, because they may have one cause.
    `failure_round` is the number of the newest counted failure.
    """

    name: str  # config key that names the environment, and its value
    max_failures: int
    kind: str = ""  # name under which users see the counters
    episodes: int = 0
    resets: int = 0
    steps: int = 0
    hangs: int = 0
    kills: int = 0
    crashes: int = 0
    failures: int = 0
    seconds: float = 0.0  # seconds that all calls of the environment took
    failures_in_a_row: int = 0
    failure_round: int = 0
    last_failure: str = ""

    @property
    def counts(self) -> Mapping[str, float]:
        """The counters by name. No counter ever shrinks."""
        return {name: float(getattr(self, name)) for name in COUNTERS}

    def count_success(self) -> None:
        """Record an episode that did not fail, and set the number of consecutive failures to 0."""
        self.failures_in_a_row = 0

    def count_failure(self, reason: str, began: int) -> None:
        """Count an episode that failed for a reason that the policy cannot have caused.

        `began` is the value of `failure_round` at the start of the episode.
        """
        self.failures += 1
        if began == self.failure_round:
            self.failures_in_a_row += 1
            self.failure_round += 1
            self.last_failure = reason

    def note_end(self, ended: WorldEnded, began: int) -> None:
        """Count the early end of an episode as a failure if the policy cannot have caused it, unless it is already
        counted."""
        if ended.is_unjudged and not ended.is_counted:
            ended.is_counted = True
            self.count_failure(str(ended), began)

    def check(self) -> None:
        """Raise an error if the environment is broken.

        Raises:
            EnvironmentBroken: too many episodes in a row have failed.
        """
        if self.failures_in_a_row >= self.max_failures:
            raise EnvironmentBroken(
                f"environment.{self.name}: {self.failures_in_a_row} episodes in a row failed for reasons that the "
                f"policy cannot have caused, the last one because {self.last_failure}; correct the environment, or "
                f"raise environment.max_failures = {self.max_failures}"
            )
