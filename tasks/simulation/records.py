"""Defines the records of a simulation, from which its results are computed; the simulated scheduler does not use them.

Times in the records are virtual seconds since the beginning of the simulation. Lengths count simulated tokens, each of
which stands for `tokens_per_tick` real tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from dataclasses import dataclass, field

from rollflow.storage.records import DiscardReason, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Bools
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.engines.timed_runs import EngineUsage


class Gauge:
    """Counts how many items are in progress at each moment, and integrates this number over time."""

    def __init__(self) -> None:
        self.active = 0
        self._usage = EngineUsage()
        self._since = 0.0

    def change(self, by: int) -> None:
        """Add `by` to the number of items in progress."""
        now = asyncio.get_running_loop().time()
        if self.active:
            passed = now - self._since
            self._usage.busy_seconds += passed
            self._usage.slot_seconds += passed * self.active
        self._since = now
        self.active += by

    @property
    def usage(self) -> EngineUsage:
        """Busy seconds and slot seconds up to now."""
        self.change(0)
        return self._usage


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of work; `version` is the policy version that results from the work."""

    began: float
    ended: float
    version: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """A formed batch; `at` is the time at which it was formed, `last_generation` the time at which the last response
    ended.
    """

    number: int
    at: float
    last_generation: float
    staleness: Counter[int]
    trajectories: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of all cumulative counters at one moment; an engine counter is summed over all engines."""

    at: float
    engine_busy: float
    engine_slots: float
    engine_tokens: int  # sampled tokens, except the tokens sampled for evaluations
    reward_busy: float


@dataclass(slots=True)
class SimulationRecords:
    """All records of one simulation."""

    formed: list[FormedBatch] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)  # train steps; each ends when its policy version is published
    updates: list[Span] = field(default_factory=list)  # pauses of the engines
    trained_lengths: array[int] = field(default_factory=lambda: array("l"))  # length of each trained response
    trained_turns: array[int] = field(default_factory=lambda: array("l"))  # number of turns of each trained response
    filtered: set[int] = field(default_factory=set)  # indices of prompts whose groups were filtered
    # generation time of each trained response
    generation_seconds: array[float] = field(default_factory=lambda: array("d"))
    discarded_groups: Counter[str] = field(default_factory=Counter)
    discarded_tokens: Counter[str] = field(default_factory=Counter)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # policy version -> counters when it was published
    last_generation: float = 0.0
    deaths: int = 0
    restarted: int = 0  # number of requests that restarted
    restarted_tokens: int = 0  # number of tokens lost because requests restarted
    taken_over: int = 0  # number of requests that moved to another engine
    evaluations: int = 0  # number of finished evaluations
    evaluation_tokens: int = 0  # number of tokens sampled for finished and unfinished evaluations

    def form(self, staged: StagedBatch) -> None:
        """Record a formed batch."""
        for discard in staged.discards:
            self.discarded_groups[discard.reason.value] += 1
            self.discarded_tokens[discard.reason.value] += discard.response_tokens
        self.filtered |= {d.key.prompt for d in staged.discards if d.reason is DiscardReason.FILTERED}
        self.discarded_tokens["surplus"] += sum(group.surplus_tokens for group in staged.groups)
        trajectories = trajectories_of(staged)
        lengths = [t.response_tokens for t in trajectories]
        staleness = Counter(staged.number - t.started_version for t in trajectories)
        now = asyncio.get_running_loop().time()
        self.formed.append(
            FormedBatch(staged.number, now, self.last_generation, staleness, len(trajectories), sum(lengths))
        )
        self.trained_lengths.extend(lengths)
        self.trained_turns.extend(map(count_turns, trajectories))
        self.generation_seconds.extend(t.generation_seconds for t in trajectories)


def trajectories_of(staged: StagedBatch) -> list[Trajectory]:
    """List the trajectories of a batch in a simulation, which does not encode groups for storage."""
    return [
        trajectory for group in staged.groups if isinstance(group, TrajectoryGroup) for trajectory in group.trajectories
    ]


def count_turns(trajectory: Trajectory) -> int:
    """Count the turns of a trajectory: the spans of sampled tokens, between which an environment added tokens."""
    return trajectory.loss_mask.data.count(b"\0\1") if isinstance(trajectory.loss_mask, Bools) else 1
