"""Defines the workloads of `benchmarks.environments`: timed environments, and the hardware that runs their episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

from benchmarks.workloads import changed, recipe
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.rollout.group import sample_seed
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.hardware import Hardware

SECONDS_PER_TOKEN = 0.01


@dataclass(frozen=True, slots=True)
class Episodes:
    """A workload of `groups` prompts with `size` episodes each. There is an environment and an engine slot for each
    episode.
    """

    name: str
    groups: int
    size: int
    environment: dict[str, Any]
    train_seconds: float = 0.0
    tokens_per_tick: int = 50
    rollout: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0

    @property
    def count(self) -> int:
        """Number of episodes in a batch, which is also the number of environments."""
        return self.groups * self.size

    def recipe(self, alpha: float, **rollout: Any) -> RunConfig:
        """Return the recipe. Environments limit the length of a turn; the limit on a whole response is so large that
        all turns fit.
        """
        section = TimedEnvironmentConfig.model_validate({"kind": "timed", "places": self.count, **self.environment})
        config = recipe(alpha, self.groups, self.size, cap=1_000_000)
        chosen = RolloutConfig.model_validate({**self.rollout, **rollout})
        return config.model_copy(update={"environment": section, "rollout": chosen})

    def hardware(self) -> Hardware:
        """Return engines with a slot for each environment, and a learner that takes `train_seconds`."""
        slots = {"count": 8, "max_concurrent_requests": -(-self.count // 8), "seconds_per_token": SECONDS_PER_TOKEN}
        endless = {"median": 1e9, "sigma": 0.0, "correlation": 0.0, "tokens_per_tick": self.tokens_per_tick}
        endless |= {"prompt_tokens": self.prompt_tokens}
        learner = {"seconds_per_version": self.train_seconds}
        return changed(Hardware(), engines=slots | self.engines, responses=endless, learner=learner)

    def draw_batches(self, versions: int) -> list[list[float]]:
        """Draw the seconds that every episode takes if it never waits, for each batch of prompts in their order."""
        config = self.recipe(1)
        assert isinstance(config.environment, TimedEnvironmentConfig)
        environment = TimedEnvironment(config.environment, self.tokens_per_tick)

        def draw(prompt: int, sample: int) -> float:
            seed = sample_seed(config.seed, prompt, sample)
            limits = environment.draw_limits(prompt, seed)
            steps = islice(environment.draw_steps(seed), 1 + len(limits))
            tokens = sum(limit or 0 for limit in limits) * self.tokens_per_tick
            return sum(step.seconds for step in steps) + tokens * SECONDS_PER_TOKEN

        batches = (range(number * self.groups, (number + 1) * self.groups) for number in range(versions))
        return [[draw(prompt, sample) for prompt in batch for sample in range(self.size)] for batch in batches]

    def bounds(self, versions: int) -> tuple[float, float]:
        """Return two lower bounds of a train step in seconds: for any schedule, and for a schedule at alpha 1 that
        trains prompts in their order.
        """
        drawn = self.draw_batches(versions)
        places = self.environment.get("places", self.count)
        never_idle = max(fmean(map(sum, drawn)) / places, self.train_seconds)
        return never_idle, max(never_idle, (fmean(map(max, drawn)) + self.train_seconds) / 2)


def gaussian(sigma: float) -> Episodes:
    """Return the workload of ROLL Flash's study of step latencies: Gaussian latencies with mean 10 s, 256 environments,
    20 turns.

    The generation of a turn takes 6.6 s. With this value, a model of the study gives the study's speed-up of 2.46 at
    sigma 10.
    """
    steps = {"median_turns": 20, "turn_tokens": 660, "step_seconds": 10, "step_sigma": sigma}
    return Episodes(f"step latency Gaussian(10, {sigma:g})", 32, 8, steps, tokens_per_tick=66)


# 16 tasks x 8 episodes, at most 50 steps and 512 tokens a turn, as in verl-agent's example for ALFWorld. The seconds of
# a step are assumed: a game takes milliseconds, and an actor that serves it among others takes seconds.
ALFWORLD = Episodes(
    "ALFWorld-like",
    16,
    8,
    {
        "median_turns": 20,
        "turns_sigma": 0.6,
        "max_turns": 50,
        "correlation": 0.5,
        "turn_tokens": 200,
        "turn_tokens_sigma": 0.4,
        "observation_tokens": 100,
        "distribution": "lognormal",
        "step_seconds": 1.0,
        "step_sigma": 1.0,
        "reset_seconds": 5.0,
        "reset_sigma": 0.5,
    },
    train_seconds=60.0,
)
# Containers start in 20 to 60 s, and commands take from parts of a second (files) to minutes (tests), as published for
# SWE agents (RollArt, SkyRL); at most 100 turns.
SWE = Episodes(
    "SWE-like",
    16,
    8,
    {
        "median_turns": 30,
        "turns_sigma": 0.4,
        "max_turns": 100,
        "correlation": 0.5,
        "turn_tokens": 300,
        "turn_tokens_sigma": 0.7,
        "observation_tokens": 400,
        "distribution": "lognormal",
        "step_seconds": 3.0,
        "step_sigma": 1.0,
        "reset_seconds": 30.0,
        "reset_sigma": 0.3,
    },
    train_seconds=120.0,
)
