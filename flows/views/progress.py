"""Computes the progress of a run from its log, for the live view, MLflow and the summary. An update reads only new
policy versions, so its cost does not grow with the run's length.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from rollflow.flows.views.pauses import paused_seconds
from rollflow.storage.log.state import RunState
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext

RECENT = 5  # Number of the newest policy versions over which a mean is taken.
KEPT = 128  # Number of the newest policy versions that are kept in memory.


@dataclass
class RunProgress:
    """The progress of a run, which is updated by reading the run's log."""

    context: RunContext
    versions: deque[PolicyVersion] = field(default_factory=lambda: deque(maxlen=KEPT))  # the newest versions
    # Maps a policy version to the seconds of pause between the previous version and this one.
    _pauses: dict[int, float] = field(default_factory=dict)
    _paused: float = 0.0  # Seconds of all pauses between policy version 0 and the newest version.

    def advance(self) -> list[PolicyVersion]:
        """Read the log, and return the policy versions that were published since the last call. The first call returns
        the newest `KEPT` versions.
        """
        newest = self.context.policies.newest()
        seen = self.versions[-1].number if self.versions else newest - KEPT
        new = list(self.context.policies.since(max(seen + 1, 0))) if newest > seen else []
        for version in new:
            before = self.versions[-1] if self.versions else self._first
            if pause := paused_seconds(self.context, before, version):
                self._pauses[version.number] = pause
                self._paused += pause
            self.versions.append(version)
        return new

    def pause_before(self, version: PolicyVersion) -> float:
        """Return for how many seconds the run was paused between the policy version `version` and the version before
        it.
        """
        return self._pauses.get(version.number, 0.0)

    @property
    def state(self) -> RunState:
        """The state of the run when its log was last read."""
        return self.context.log.state

    @property
    def version(self) -> int:
        """The number of the newest policy version, or -1 if version 0 is not published yet."""
        return self.versions[-1].number if self.versions else -1

    @property
    def rewards(self) -> tuple[float, ...]:
        """The mean training reward of each of the newest policy versions."""
        return tuple(v.metrics["reward"] for v in self.versions if v.number)

    @property
    def staleness(self) -> Counter[int]:
        """The number of trained groups of responses by staleness. The staleness of a group is the staleness of its
        oldest response.
        """
        return self.state.totals.staleness

    @property
    def domains(self) -> Counter[str]:
        """The number of trained groups of responses by prompt domain."""
        return trained_domains(self.state, self.context.config)

    @cached_property
    def _first(self) -> PolicyVersion:
        return self.context.policies.find(0)

    @property
    def training_seconds(self) -> float:
        """The seconds from policy version 0 to the newest version, without pauses, stops and downtime."""
        return max(0.0, self.versions[-1].at - self._first.at - self._paused) if self.versions else 0.0

    @property
    def paused_seconds(self) -> float:
        """The seconds between policy version 0 and the newest version during which the run was paused, stopped or
        down.
        """
        return self._paused

    @property
    def tokens(self) -> int:
        """The number of response tokens that the policy was trained on."""
        return self.state.totals.tokens["trained"]

    @property
    def tokens_per_second(self) -> float:
        """The number of trained response tokens per second of training. The rate is 0 if the machine's clock was set
        back.
        """
        return self.tokens / self.training_seconds if self.training_seconds else 0.0

    @property
    def tokens_per_second_now(self) -> float:
        """The number of trained response tokens per second over the newest policy versions."""
        last = list(islice(reversed(self.versions), RECENT + 1))
        seconds = last[0].at - last[-1].at - sum(map(self.pause_before, last[:-1])) if last else 0.0
        return sum(v.metrics["response_tokens"] for v in last[:-1]) / seconds if seconds > 0 else 0.0


def system_figures(before: PolicyVersion, version: PolicyVersion, paused: float = 0.0) -> dict[str, float]:
    """Return the costs of a policy version: tokens per second, the share of time that the learner waited, and the share
    of discarded tokens.

    `paused` is the number of seconds that are subtracted from the time between the two policy versions. Values that
    need the time are left out if the clock was set back.
    """
    metrics, seconds = version.metrics, version.at - before.at - paused
    left_out = metrics.get("left_out_tokens", 0.0)
    used = metrics["response_tokens"] - left_out
    lost = metrics["discarded_tokens"] + metrics["surplus_tokens"] + left_out
    figures = {"waste": lost / (lost + used)} if lost + used else {}
    if seconds > 0:
        figures |= {"tokens_per_second": used / seconds, "idle": min(1.0, metrics["wait_seconds"] / seconds)}
    return figures


def length_bias(tokens: float, groups: float, lost_tokens: float, lost_groups: float) -> float:
    """Return the relative difference between the mean length of trained groups of responses and that of all generated
    groups. The length bias is negative if trained groups are shorter.

    The length of a discarded group is its number of tokens when it was discarded, so the true bias may be larger.
    Surplus responses, which were generated beyond the size of a group, are not counted.
    """
    every = tokens + lost_tokens
    return (tokens / groups) / (every / (groups + lost_groups)) - 1.0 if groups and every else 0.0


def trained_domains(state: RunState, config: RunConfig) -> Counter[str]:
    """Count the trained groups of responses by prompt domain. Trained groups are all issued prompts except those that
    were filtered, are in progress or are in a waiting batch.
    """
    waiting = (group.prompt for batch in state.waiting.values() for group in batch.groups)
    elsewhere = _count_by_source((*state.open, *waiting), len(config.prompts))
    trained: Counter[str] = Counter()
    for source, (issued, filtered) in enumerate(zip(state.issued, state.filtered, strict=True)):
        trained[config.prompts[source].domain] += issued - filtered - elsewhere[source]
    return trained


def _count_by_source(prompts: Iterable[int], sources: int) -> Counter[int]:
    return Counter(prompt % sources for prompt in prompts)
