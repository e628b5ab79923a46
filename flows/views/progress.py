"""A run's progress according to its log; the live view, MLflow and the summary are built from this progress.

The cost of following a run does not grow with its length: totals are part of the log's state, and only the newest
versions are read.
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

RECENT = 5  # number of versions that count as recent
KEPT = 128  # number of versions kept in memory


@dataclass
class RunProgress:
    """Follows a run's log, and computes the run's progress."""

    context: RunContext
    versions: deque[PolicyVersion] = field(default_factory=lambda: deque(maxlen=KEPT))  # the newest versions
    _pauses: dict[int, float] = field(default_factory=dict)  # version -> seconds of pause before this version, if any
    _paused: float = 0.0  # seconds between version 0 and the newest version

    def advance(self) -> list[PolicyVersion]:
        """Return the versions that were published since the last complete read; at the first read, the newest `KEPT`
        versions.
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
        """Return the seconds for which the run was paused between the previous version and this one."""
        return self._pauses.get(version.number, 0.0)

    @property
    def state(self) -> RunState:
        """The run's state when its log was last read."""
        return self.context.log.state

    @property
    def version(self) -> int:
        """The newest version that was read from the log; -1 before the first version."""
        return self.versions[-1].number if self.versions else -1

    @property
    def rewards(self) -> tuple[float, ...]:
        """Mean training reward of the newest versions' batches."""
        return tuple(v.metrics["reward"] for v in self.versions if v.number)

    @property
    def staleness(self) -> Counter[int]:
        """Number of trained groups by staleness; a group's staleness is that of its oldest response."""
        return self.state.totals.staleness

    @property
    def domains(self) -> Counter[str]:
        """Number of trained groups by domain."""
        return trained_domains(self.state, self.context.config)

    @cached_property
    def _first(self) -> PolicyVersion:
        return self.context.policies.find(0)

    @property
    def training_seconds(self) -> float:
        """Seconds from version 0 to the newest version, without pauses, stops and downtime."""
        return max(0.0, self.versions[-1].at - self._first.at - self._paused) if self.versions else 0.0

    @property
    def paused_seconds(self) -> float:
        """Seconds between version 0 and the newest version in which the run was paused, stopped or down."""
        return self._paused

    @property
    def tokens(self) -> int:
        """Number of response tokens trained on."""
        return self.state.totals.tokens["trained"]

    @property
    def tokens_per_second(self) -> float:
        """Trained response tokens per second of training; 0 if the machine's clock stepped back."""
        return self.tokens / self.training_seconds if self.training_seconds else 0.0

    @property
    def tokens_per_second_now(self) -> float:
        """Trained response tokens per second over the newest versions."""
        last = list(islice(reversed(self.versions), RECENT + 1))
        seconds = last[0].at - last[-1].at - sum(map(self.pause_before, last[:-1])) if last else 0.0
        return sum(v.metrics["response_tokens"] for v in last[:-1]) / seconds if seconds > 0 else 0.0


def system_figures(before: PolicyVersion, version: PolicyVersion, paused: float = 0.0) -> dict[str, float]:
    """Compute the cost figures of a version, without the `paused` seconds before the version; no figures if the clock
    stepped back.

    The figures are trained tokens per second, the share of the time that the learner waited, and the share of discarded
    tokens.
    """
    metrics, seconds = version.metrics, version.at - before.at - paused
    used, lost = metrics["response_tokens"], metrics["discarded_tokens"] + metrics["surplus_tokens"]
    figures = {"waste": lost / (lost + used)} if lost + used else {}
    if seconds > 0:
        figures |= {"tokens_per_second": used / seconds, "idle": min(1.0, metrics["wait_seconds"] / seconds)}
    return figures


def length_bias(tokens: float, groups: float, lost_tokens: float, lost_groups: float) -> float:
    """Return the share by which the mean length of trained groups is above (+) or below (-) that of all generated
    groups.

    A discarded group counts with the tokens that it had, so the true bias may be larger; surplus responses do not
    count.
    """
    every = tokens + lost_tokens
    return (tokens / groups) / (every / (groups + lost_groups)) - 1.0 if groups and every else 0.0


def trained_domains(state: RunState, config: RunConfig) -> Counter[str]:
    """Count trained groups by domain: the domain's issued prompts, less prompts that are filtered, open or in an unused
    batch.
    """
    waiting = (group.prompt for batch in state.waiting.values() for group in batch.groups)
    elsewhere = _count_by_source((*state.open, *waiting), len(config.prompts))
    trained: Counter[str] = Counter()
    for source, (issued, filtered) in enumerate(zip(state.issued, state.filtered, strict=True)):
        trained[config.prompts[source].domain] += issued - filtered - elsewhere[source]
    return trained


def _count_by_source(prompts: Iterable[int], sources: int) -> Counter[int]:
    return Counter(prompt % sources for prompt in prompts)
