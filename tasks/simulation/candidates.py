"""Defines the planner's types: candidate configurations, the outcomes of their simulations, limits, and a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware

CHOICES = (
    "redundant_groups",
    "redundant_responses",
    "tail_batching",
    "on_stale",
    "max_batches_ahead",
)  # keys of `RolloutConfig`


@dataclass(frozen=True, slots=True)
class SimulationBudget:
    """The largest number of simulations that the planner may run, and the length of each simulation.

    A simulation is measured after a warm-up of 2 + alpha policy versions, over at least the given numbers of versions
    and trajectories.
    """

    simulations: int  # largest number of simulations that the planner may run
    screen_versions: int
    screen_trajectories: int
    final_versions: int
    final_trajectories: int

    def count_screening(self, config: RunConfig) -> int:
        """Return the number of policy versions to measure in a candidate's first, short simulation."""
        return max(self.screen_versions, _versions(config, self.screen_trajectories))

    def finals(self, config: RunConfig) -> int:
        """Return the number of policy versions to measure in a candidate's final, long simulation."""
        return max(self.final_versions, _versions(config, self.final_trajectories))


FULL = SimulationBudget(80, 4, 8_000, 16, 40_000)
QUICK = SimulationBudget(40, 2, 4_000, 8, 16_000)


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits that a configuration recommended by the planner must not exceed."""

    bias: float = 0.02  # largest bias of response lengths, in either direction, as a share of the mean length
    waste: float = 0.15  # largest share of all sampled tokens that may be wasted


LIMITS = PlanLimits()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate configuration: a division of the GPUs, a staleness limit alpha, and options of the rollout."""

    engines: int
    learner_gpus: float
    colocated: bool
    async_ratio: float
    redundant_groups: int
    redundant_responses: int
    tail_batching: bool
    on_stale: Literal["drop", "wait"] | None
    max_batches_ahead: float | None = None

    @property
    def drops(self) -> bool:
        """True if this configuration allows slow groups of responses to be preempted."""
        chosen = RolloutConfig(
            redundant_groups=self.redundant_groups, tail_batching=self.tail_batching, on_stale=self.on_stale
        )
        return chosen.bound == "drop"

    @property
    def lead(self) -> float:
        """Number of training batches by which generation may run ahead of training."""
        return self.async_ratio if self.max_batches_ahead is None else self.max_batches_ahead

    def changes(self, base: RunConfig, hardware: Hardware) -> dict[str, Any]:
        """Map config keys to values, for the keys in which the candidate differs from the user's config."""
        slots, width = hardware.engines.max_concurrent_requests, hardware.engines.gpus_per_engine
        wanted: dict[str, Any] = {"async_ratio": self.async_ratio, "engine.replicas": self.engines}
        wanted |= {"engine.max_concurrent_requests": slots} if slots else {}
        wanted |= {"engine.tensor_parallel": int(width)} if base.engine.kind == "vllm" and width == int(width) else {}
        ranks = 0 if self.colocated else int(self.learner_gpus)
        wanted |= {"train.ranks": ranks} if ranks == self.learner_gpus else {}
        wanted |= {f"rollout.{name}": getattr(self, name) for name in CHOICES}
        return {key: value for key, value in wanted.items() if _get(base, key) != value}

    def config(self, base: RunConfig, hardware: Hardware) -> RunConfig:
        """Return the user's config with the values of this candidate configuration.

        Raises:
            ValidationError: the values of the candidate configuration contradict each other.
        """
        tree = base.model_dump(mode="json", exclude_unset=True)
        for key, value in self.changes(base, hardware).items():
            *parents, last = key.split(".")
            node = tree
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = value
        if "engine" in tree:
            tree["engine"].setdefault("kind", base.engine.kind)
        return RunConfig.model_validate(tree)

    def hardware(self, base: Hardware) -> Hardware:
        """Return the hardware with this candidate's division of the GPUs between rollout and training."""
        engines = base.engines.model_copy(update={"count": self.engines})
        learner = base.learner.model_copy(update={"gpus": self.learner_gpus, "colocated": self.colocated})
        return base.model_copy(update={"engines": engines, "learner": learner})


@dataclass(frozen=True, slots=True)
class CandidateOutcome:
    """The outcome of the simulation of a candidate configuration."""

    candidate: Candidate
    versions: int
    figures: Figures
    bias: float  # bias of response lengths in the steady state; see `planner`
    bias_error: float  # standard error of `bias`
    wasted: float  # share of all sampled tokens that was wasted

    @property
    def throughput(self) -> float:
        """Number of trained trajectories per second."""
        return self.figures.trajectories_per_second

    def marks(self, limits: PlanLimits) -> tuple[str, ...]:
        """Return the names of the limits that the outcome exceeds; the bias must exceed its limit by two standard
        errors.
        """
        biased, wasteful = abs(self.bias) - 2.0 * self.bias_error > limits.bias, self.wasted > limits.waste
        return (*(("biased",) if biased else ()), *(("wasteful",) if wasteful else ()))


def _versions(config: RunConfig, trajectories: int) -> int:
    return math.ceil(trajectories / (config.groups * config.group_size))


def _get(config: RunConfig, key: str) -> object:
    node: object = config
    for name in key.split("."):
        node = getattr(node, name)
    return node
