"""A run's course as its log tells it: what the live view, MLflow and the summary are made from.

Its cost does not grow with the run: totals stand in the log's state, and only the newest versions are read.
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

RECENT = 5  # versions that count as recent
KEPT = 128  # versions at hand


@dataclass
class Progress:
    """Follows the log."""

    context: RunContext
    versions: deque[PolicyVersion] = field(default_factory=lambda: deque(maxlen=KEPT))  # the newest ones
    _pauses: dict[int, float] = field(default_factory=dict)  # version -> seconds of pause before it, if any
    _paused: float = 0.0  # seconds, between version 0 and the newest

    def advance(self) -> list[PolicyVersion]:
        """The versions that were published since the last complete read; at first, the newest `KEPT`."""
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
        """The run as its log was last read."""
        return self.context.log.state

    @property
    def version(self) -> int:
        """The newest version seen; -1 before the first."""
        return self.versions[-1].number if self.versions else -1

    @property
    def rewards(self) -> tuple[float, ...]:
        """Mean training reward of the newest versions' batches."""
        return tuple(v.metrics["reward"] for v in self.versions if v.number)

    @property
    def staleness(self) -> Counter[int]:
        """Staleness -> groups trained on, by their oldest response."""
        return self.state.totals.staleness

    @property
    def domains(self) -> Counter[str]:
        """Domain -> groups trained on."""
        return trained_domains(self.state, self.context.config)

    @cached_property
    def _first(self) -> PolicyVersion:
        return self.context.policies.find(0)

    @property
    def training_seconds(self) -> float:
        """Seconds from version 0 to the newest, without pauses, stops and absences."""
        return max(0.0, self.versions[-1].at - self._first.at - self._paused) if self.versions else 0.0

    @property
    def paused_seconds(self) -> float:
        """Seconds between version 0 and the newest in which the run was paused, stopped or away."""
        return self._paused

    @property
    def tokens(self) -> int:
        """Response tokens trained on."""
        return self.state.totals.tokens["trained"]

    @property
    def tokens_per_second(self) -> float:
        """Trained response tokens over the time it took. If a clock stepped back: none, rather than a wrong figure."""
        return self.tokens / self.training_seconds if self.training_seconds else 0.0

    @property
    def tokens_per_second_now(self) -> float:
        """The same of the newest versions."""
        last = list(islice(reversed(self.versions), RECENT + 1))
        seconds = last[0].at - last[-1].at - sum(map(self.pause_before, last[:-1])) if last else 0.0
        return sum(v.metrics["response_tokens"] for v in last[:-1]) / seconds if seconds > 0 else 0.0


def system_figures(before: PolicyVersion, version: PolicyVersion, paused: float = 0.0) -> dict[str, float]:
    """Compute what a version took, without the `paused` seconds before it; a clock that stepped back gives no figure.

    These are trained tokens a second, the share of the time that the learner waited, and the share of tokens that was
    thrown away.
    """
    told, seconds = version.metrics, version.at - before.at - paused
    used, lost = told["response_tokens"], told["discarded_tokens"] + told["surplus_tokens"]
    found = {"waste": lost / (lost + used)} if lost + used else {}
    if seconds > 0:
        found |= {"tokens_per_second": used / seconds, "idle": min(1.0, told["wait_seconds"] / seconds)}
    return found


def length_bias(tokens: float, groups: float, lost_tokens: float, lost_groups: float) -> float:
    """By which share the groups trained on are longer (+) or shorter (-) than all that were generated.

    What was discarded counts as far as it had come, so the true bias may be stronger; surplus responses do not count.
    """
    every = tokens + lost_tokens
    return (tokens / groups) / (every / (groups + lost_groups)) - 1.0 if groups and every else 0.0


def trained_domains(state: RunState, config: RunConfig) -> Counter[str]:
    """Domain -> groups trained on: its issued prompts, less those that are filtered, open or wait in a batch."""
    waiting = (group.prompt for batch in state.waiting.values() for group in batch.groups)
    elsewhere = _by_source((*state.open, *waiting), len(config.prompts))
    trained: Counter[str] = Counter()
    for source, (issued, filtered) in enumerate(zip(state.issued, state.filtered, strict=True)):
        trained[config.prompts[source].domain] += issued - filtered - elsewhere[source]
    return trained


def _by_source(prompts: Iterable[int], sources: int) -> Counter[int]:
    return Counter(prompt % sources for prompt in prompts)
