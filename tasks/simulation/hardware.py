"""The hardware file: a TOML file with the assumptions of a simulation about machines and workload.

All seconds in a hardware file are those of one engine, one worker or one GPU; all lengths are numbers of response
tokens. This module imports only pydantic.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar, Self

from pydantic import Field, model_validator

from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.renamed_keys import HARDWARE, Renames
from rollflow.tasks.runtime.sections import Section, refuse

GRAINS = 128  # number of simulated tokens in the longest response, so that a response may span several policy versions


class EnginesHardware(Section):
    """The engines and their decoding speed."""

    count: int | None = Field(None, gt=0, description="number of engines; default: the recipe's engine.replicas")
    max_concurrent_requests: int | None = Field(
        None,
        gt=0,
        description="largest number of requests that one engine runs at a time; default: the recipe's "
        "engine.max_concurrent_requests",
    )
    gpus_per_engine: float = Field(1.0, gt=0, description="number of GPUs of each engine")
    seconds_per_token: float = Field(
        0.01, gt=0, description="seconds that an engine takes for each token of a request that runs alone"
    )
    prefill_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds that an engine takes for each prompt before the first token of the response, and again "
        "after each weight update",
    )
    prefill_seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="seconds that an engine stops for each prompt token that it computes, and, after a weight "
        "update, for each token in its KV cache",
    )
    batch_slowdown: float = Field(
        0.0,
        ge=0,
        description="c in this formula: with n running requests and t tokens in the KV cache, a request decodes 1 + "
        "c(n - 1) + r t times slower than alone (r is kv_read_cost)",
    )
    kv_read_cost: float = Field(
        0.0,
        ge=0,
        description="r in the formula of batch_slowdown: slowdown of every request for each token in the KV cache",
    )
    kv_tokens: int | None = Field(
        None,
        gt=0,
        description="capacity of the KV cache, in tokens; when the cache is full, the request that started last is "
        "preempted; default: no limit",
    )
    speeds: tuple[float, ...] = Field(
        (),
        description="speeds of the first engines, in order; a speed divides an engine's seconds per token and prompt",
    )
    speed_spread: float = Field(
        0.0,
        ge=0,
        description="sigma of the lognormal distribution of the speeds of engines that `speeds` leaves out; the median "
        "is 1",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(speed <= 0 for speed in self.speeds):
            refuse("engines.speeds", list(self.speeds), "every speed must be above 0; correct the list")
        return self


class ResponsesHardware(Section):
    """The lengths of responses: lognormal, or a list of measured lengths."""

    median: float = Field(1000.0, gt=0, description="median length of a response, in tokens")
    sigma: float = Field(1.0, ge=0, description="sigma of the lognormal distribution of response lengths")
    prompt_tokens: int = Field(0, ge=0, description="number of tokens that each prompt takes in the KV cache")
    cap: int | None = Field(
        None, gt=0, description="largest length of a response, in tokens; default: the recipe's engine.max_new_tokens"
    )
    correlation: float = Field(
        0.7, ge=0, le=1, description="correlation (rho) of the lengths of responses to one prompt"
    )
    lengths: tuple[int, ...] = Field(
        (), description="measured response lengths, in tokens; they replace the lognormal lengths"
    )
    tokens_per_tick: int | None = Field(
        None, gt=0, description="number of real tokens that one simulated token stands for; default: cap / 128"
    )


class RewardHardware(Section):
    """The time to score a response, and the share of correct responses."""

    seconds: float = Field(0.0, ge=0, description="mean time to score a response, in seconds")
    sigma: float = Field(
        0.0,
        ge=0,
        description="sigma of the lognormal distribution of scoring times; 0: every score takes the mean time",
    )
    measured: tuple[float, ...] = Field(
        (), description="measured scoring times, in seconds; they replace the lognormal times"
    )
    workers: int | None = Field(
        None, gt=0, description="largest number of responses that are scored at a time; default: no limit"
    )
    accuracy: float = Field(0.5, ge=0, le=1, description="share of responses that are scored as correct")
    agreeing: float = Field(
        0.0, ge=0, le=1, description="share of prompts whose responses are either all correct or all wrong"
    )


class LearnerHardware(Section):
    """The seconds of a train step: seconds + epochs x (per_trajectory x trajectories + per_token x tokens) / gpus."""

    gpus: float = Field(1.0, gt=0, description="number of GPUs that train")
    colocated: bool = Field(
        False,
        description="whether the learner trains on the GPUs of the engines, in turns with them; only with "
        "async_ratio = 0",
    )
    epochs: float = Field(1.0, gt=0, description="number of passes of the learner over each batch")
    seconds_per_version: float = Field(
        0.0,
        ge=0,
        description="seconds that each version takes whatever its batch, for example for publishing and for the "
        "optimizer",
    )
    seconds_per_trajectory: float = Field(
        0.0, ge=0, description="seconds of one GPU that each trajectory takes to train"
    )
    seconds_per_token: float = Field(
        0.0, ge=0, description="seconds of one GPU that each response token takes to train"
    )
    measured: tuple[float, ...] = Field(
        (),
        description="measured seconds of whole train steps, one for each version; they replace computed seconds",
    )


class UpdateHardware(Section):
    """The time to bring a new version to the engines."""

    seconds: float = Field(0.0, ge=0, description="seconds that every engine pauses to load a new version")
    fetch_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds that a new version takes to reach an engine, while the engine goes on generating",
    )


class EngineDeath(Section):
    """The death of one engine."""

    at_seconds: float = Field(ge=0, description="time at which the engine dies, in seconds from the start of the run")
    engine: int = Field(ge=0, description="number of the engine that dies; the first engine has number 0")


class FaultsHardware(Section):
    """Faults: engines that die and are replaced, and engines that are slow."""

    deaths: tuple[EngineDeath, ...] = ()
    deaths_per_hour: float = Field(0.0, ge=0, description="average number of random deaths of each engine per hour")
    restart_seconds: float = Field(
        30.0, ge=0, description="seconds from the death of an engine until another engine replaces it"
    )
    slow_share: float = Field(0.0, ge=0, le=1, description="share of engines that are slow during the whole run")
    slow_factor: float = Field(1.0, ge=1, description="factor by which a slow engine is slower than the other engines")


class Hardware(Section):
    """One hardware file."""

    keys_page: ClassVar[str] = "`rollflow keys --hardware`"
    renames: ClassVar[Renames] = HARDWARE

    title: str = Field("", description="title of the simulation's figures and timelines")
    engines: EnginesHardware = EnginesHardware()
    responses: ResponsesHardware = ResponsesHardware()
    reward: RewardHardware = RewardHardware()
    learner: LearnerHardware = LearnerHardware()
    update: UpdateHardware = UpdateHardware()
    faults: FaultsHardware = FaultsHardware()

    def gpus(self, config: RunConfig) -> float:
        """Return the total number of GPUs of the engines and the learner."""
        learner = 0.0 if self.learner.colocated else self.learner.gpus
        return self.engine_count(config) * self.engines.gpus_per_engine + learner

    def engine_count(self, config: RunConfig) -> int:
        """Return the number of engines for this run's config."""
        return self.engines.count or config.engine.replicas

    def cap(self, config: RunConfig) -> int:
        """Return the largest possible length of a response, in tokens."""
        return self.responses.cap or config.engine.max_new_tokens

    def engine(self, config: RunConfig) -> TimedEngineConfig:
        """Build the `[engine]` config section for simulated engines of this hardware, with speed 1."""
        engines, responses, cap = self.engines, self.responses, self.cap(config)
        grain = responses.tokens_per_tick or max(1, cap // GRAINS)
        return TimedEngineConfig(
            replicas=self.engine_count(config),
            max_concurrent_requests=engines.max_concurrent_requests or config.engine.max_concurrent_requests,
            max_new_tokens=math.ceil(cap / grain),
            temperature=config.engine.temperature,
            on_weight_update=config.engine.on_weight_update,
            median_tokens=responses.median,
            sigma=responses.sigma,
            correlation=responses.correlation,
            lengths=responses.lengths,
            seconds_per_token=engines.seconds_per_token,
            prefill_seconds=engines.prefill_seconds,
            update_seconds=self.update.seconds,
            batch_slowdown=engines.batch_slowdown,
            kv_read_cost=engines.kv_read_cost,
            kv_tokens=engines.kv_tokens,
            prompt_tokens=responses.prompt_tokens,
            prefill_seconds_per_token=engines.prefill_seconds_per_token,
            tokens_per_tick=grain,
        )

    def speeds(self, config: RunConfig) -> list[float]:
        """Draw the speed of each engine, relative to the seconds in the hardware file."""
        draw, engines, faults = random.Random(f"speeds {config.seed}"), self.engines, self.faults
        found = []
        for place in range(self.engine_count(config)):
            spread = math.exp(engines.speed_spread * draw.gauss(0.0, 1.0))
            slow = faults.slow_factor if draw.random() < faults.slow_share else 1.0
            found.append((engines.speeds[place] if place < len(engines.speeds) else spread) / slow)
        return found

    def train_seconds(self, version: int, trajectories: float, tokens: float) -> float:
        """Compute the seconds of the train step to policy version `version`, with these numbers of trajectories and
        tokens."""
        learner = self.learner
        if learner.measured:
            return learner.measured[(version - 1) % len(learner.measured)]
        work = trajectories * learner.seconds_per_trajectory + tokens * learner.seconds_per_token
        return learner.seconds_per_version + learner.epochs * work / learner.gpus
