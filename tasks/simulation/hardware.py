"""Defines the hardware file: a TOML file with the assumptions of a simulation about machines and workload.

All seconds apply to one engine, one worker or one GPU; all lengths are numbers of response tokens.
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

GRAINS = 128  # number of simulated tokens in the longest response; large, so that it may span several policy versions


class EnginesHardware(Section):
    """The inference engines of the simulated hardware, and how fast they generate tokens."""

    count: int | None = Field(
        None, gt=0, description="number of inference engines; default: engine.replicas of the recipe"
    )
    max_concurrent_requests: int | None = Field(
        None,
        gt=0,
        description="largest number of requests that one inference engine runs at the same time; default: "
        "engine.max_concurrent_requests in the recipe",
    )
    gpus_per_engine: float = Field(1.0, gt=0, description="number of GPUs that each inference engine uses")
    seconds_per_token: float = Field(
        0.01,
        gt=0,
        description="seconds that an engine takes to generate one token if only one request runs on the engine",
    )
    prefill_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds that an engine takes to process a prompt before the first token of the response, and "
        "again after each weight update",
    )
    prefill_seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="seconds for which an engine stops all requests for each prompt token that it computes and, after "
        "a weight update, for each token in its KV cache",
    )
    batch_slowdown: float = Field(
        0.0,
        ge=0,
        description="slowdown c by other requests: with n running requests and t tokens in the KV cache, generating "
        "a token takes 1 + c(n - 1) + r t times as long as in a request that runs alone; r is kv_read_cost",
    )
    kv_read_cost: float = Field(
        0.0,
        ge=0,
        description="slowdown r of every request for each token in the KV cache, in the formula of batch_slowdown",
    )
    kv_tokens: int | None = Field(
        None,
        gt=0,
        description="capacity of the KV cache of one engine, in tokens; when the cache is full, the request that "
        "started last is preempted; default: no limit",
    )
    speeds: tuple[float, ...] = Field(
        (),
        description="speed factors of the first engines, in order; the seconds per token and per prompt of an "
        "engine are divided by its factor",
    )
    speed_spread: float = Field(
        0.0,
        ge=0,
        description="sigma of the lognormal distribution from which the speed factors of engines without an entry "
        "in `speeds` are drawn; the median factor is 1; 0: these engines have the factor 1",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(speed <= 0 for speed in self.speeds):
            refuse("engines.speeds", list(self.speeds), "every speed must be above 0; correct the list")
        return self


class ResponsesHardware(Section):
    """The lengths of simulated responses: from a lognormal distribution, or from a list of measured lengths."""

    median: float = Field(1000.0, gt=0, description="median length of a simulated response, in tokens")
    sigma: float = Field(
        1.0,
        ge=0,
        description="sigma of the lognormal distribution of response lengths; 0: every response has the median length",
    )
    prompt_tokens: int = Field(0, ge=0, description="number of tokens that each prompt occupies in the KV cache")
    cap: int | None = Field(
        None, gt=0, description="largest length of a response, in tokens; default: engine.max_new_tokens of the recipe"
    )
    correlation: float = Field(
        0.7,
        ge=0,
        le=1,
        description="correlation between the lengths of the responses to one prompt, from 0 (independent) to 1 (equal)",
    )
    lengths: tuple[int, ...] = Field(
        (),
        description="list of measured response lengths, in tokens, from which lengths are drawn in place of the "
        "lognormal distribution",
    )
    tokens_per_tick: int | None = Field(
        None,
        gt=0,
        description="number of real tokens that one simulated token stands for; a larger number makes the "
        "simulation faster and coarser; default: cap / 128",
    )


class RewardHardware(Section):
    """How long it takes to score a simulated response, and how many simulated responses are correct."""

    seconds: float = Field(0.0, ge=0, description="mean time to score one response, in seconds")
    sigma: float = Field(
        0.0,
        ge=0,
        description="sigma of the lognormal distribution of scoring times; 0: scoring every response takes the mean "
        "time",
    )
    measured: tuple[float, ...] = Field(
        (),
        description="list of measured scoring times, in seconds, which are used in place of the lognormal distribution",
    )
    workers: int | None = Field(
        None, gt=0, description="largest number of responses that are scored at the same time; default: no limit"
    )
    accuracy: float = Field(0.5, ge=0, le=1, description="share of responses that are scored as correct")
    agreeing: float = Field(
        0.0, ge=0, le=1, description="share of prompts whose responses are either all correct or all wrong"
    )


class LearnerHardware(Section):
    """The learner of the simulated hardware. A train step takes seconds_per_version + epochs x (seconds_per_trajectory
    x trajectories + seconds_per_token x tokens) / gpus.
    """

    gpus: float = Field(1.0, gt=0, description="number of GPUs on which the learner trains")
    colocated: bool = Field(
        False,
        description="whether learner and engines take turns on the same GPUs; true is allowed only with async_ratio "
        "= 0",
    )
    shared_speed: float = Field(
        1.0,
        gt=0,
        le=1,
        description="speed of engines and learner while both work, as a share of their speed while only one of them "
        "works; 1: engines and learner have hardware of their own",
    )
    epochs: float = Field(1.0, gt=0, description="number of times that the learner trains on each batch")
    seconds_per_version: float = Field(
        0.0,
        ge=0,
        description="fixed part of a train step's duration, in seconds, for example for the optimizer and for "
        "publishing the weights",
    )
    seconds_per_trajectory: float = Field(
        0.0,
        ge=0,
        description="seconds that one GPU takes to train on one trajectory, in addition to the seconds for its tokens",
    )
    seconds_per_token: float = Field(0.0, ge=0, description="seconds that one GPU takes to train on one response token")
    measured: tuple[float, ...] = Field(
        (),
        description="list of measured durations of train steps, in seconds, one for each policy version; they "
        "replace the computed durations",
    )


class UpdateHardware(Section):
    """How long it takes until the engines run a new policy version."""

    seconds: float = Field(0.0, ge=0, description="seconds for which every engine pauses to load a new policy version")
    fetch_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds that the weights of a new policy version take to reach an engine, while the engine "
        "continues to generate",
    )


class EngineDeath(Section):
    """A crash of one simulated engine at a given time."""

    at_seconds: float = Field(
        ge=0, description="time at which the engine crashes, in seconds from the start of the run"
    )
    engine: int = Field(ge=0, description="number of the engine that crashes; the first engine has number 0")


class FaultsHardware(Section):
    """Simulated faults: engines that crash and are restarted, and engines that are slow."""

    deaths: tuple[EngineDeath, ...] = ()
    deaths_per_hour: float = Field(0.0, ge=0, description="average number of random crashes of each engine per hour")
    restart_seconds: float = Field(
        30.0, ge=0, description="seconds from the crash of an engine until its replacement runs"
    )
    slow_share: float = Field(
        0.0, ge=0, le=1, description="share of engines that are slow during the whole simulated run"
    )
    slow_factor: float = Field(
        1.0, ge=1, description="factor by which a slow engine takes longer than the other engines"
    )


class Hardware(Section):
    """A hardware file: the assumptions of a simulation about machines and workload."""

    keys_page: ClassVar[str] = "`rollflow keys --hardware`"
    renames: ClassVar[Renames] = HARDWARE

    title: str = Field("", description="title that is shown with the results and timelines of the simulation")
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
