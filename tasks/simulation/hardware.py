"""The assumptions of a simulation about machines and workload: one TOML file, typed and frozen.

Seconds are the seconds of one engine, one worker or one GPU; lengths count response tokens. This module imports only
pydantic.
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

GRAINS = 128  # simulated tokens of the longest response: enough to show versions per token, in short arrays


class EnginesHardware(Section):
    """The engines and their decoding speed."""

    count: int | None = Field(None, gt=0, description="number of engines; default: the recipe's engine.replicas")
    max_concurrent_requests: int | None = Field(
        None,
        gt=0,
        description="requests that one engine runs at a time; default: the recipe's engine.max_concurrent_requests",
    )
    gpus_per_engine: float = Field(1.0, gt=0, description="GPUs of each engine")
    seconds_per_token: float = Field(0.01, gt=0, description="seconds for each token of a request that runs alone")
    prefill_seconds: float = Field(
        0.0, ge=0, description="seconds for each prompt before its first token, and again after each update"
    )
    prefill_seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="seconds that an engine stops for each token of a prompt, and for each token in its cache after "
        "an update",
    )
    batch_slowdown: float = Field(
        0.0,
        ge=0,
        description="c: with n running requests and t tokens in the KV cache, each request decodes 1 + c(n - 1) + r t "
        "times slower than alone",
    )
    kv_read_cost: float = Field(
        0.0, ge=0, description="r in the formula of batch_slowdown: the cost of reading one token of the KV cache"
    )
    kv_tokens: int | None = Field(
        None,
        gt=0,
        description="capacity of the KV cache, in tokens; when it is full, the request that started last is "
        "preempted; default: no limit",
    )
    speeds: tuple[float, ...] = Field((), description="speeds of the first engines, relative to the seconds above")
    speed_spread: float = Field(
        0.0, ge=0, description="sigma of the lognormal speeds of the other engines, with median 1"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(speed <= 0 for speed in self.speeds):
            refuse("engines.speeds", list(self.speeds), "every speed must be above 0")
        return self


class ResponsesHardware(Section):
    """The lengths of responses: lognormal or measured."""

    median: float = Field(1000.0, gt=0, description="median length of a response, in tokens")
    sigma: float = Field(1.0, ge=0, description="sigma of the lognormal length")
    prompt_tokens: int = Field(0, ge=0, description="tokens of each prompt in the KV cache")
    cap: int | None = Field(
        None, gt=0, description="largest length of a response, in tokens; default: the recipe's engine.max_new_tokens"
    )
    correlation: float = Field(
        0.7, ge=0, le=1, description="correlation (rho) of the lengths of responses to one prompt"
    )
    lengths: tuple[int, ...] = Field((), description="measured lengths; they replace the lognormal ones")
    tokens_per_tick: int | None = Field(
        None, gt=0, description="real tokens that one simulated token stands for; default: cap / 128"
    )


class RewardHardware(Section):
    """The time and the accuracy of scores."""

    seconds: float = Field(0.0, ge=0, description="mean time to score a response, in seconds")
    sigma: float = Field(0.0, ge=0, description="sigma of the lognormal scoring time; 0: always the mean")
    measured: tuple[float, ...] = Field(
        (), description="measured scoring times, in seconds; they replace the lognormal ones"
    )
    workers: int | None = Field(None, gt=0, description="responses that are scored at a time; default: no limit")
    accuracy: float = Field(0.5, ge=0, le=1, description="share of correct answers")
    agreeing: float = Field(0.0, ge=0, le=1, description="share of prompts whose answers are all correct or all wrong")


class LearnerHardware(Section):
    """The time of a train step: seconds + epochs x (per_trajectory x trajectories + per_token x tokens) / gpus."""

    gpus: float = Field(1.0, gt=0, description="GPUs that train")
    colocated: bool = Field(False, description="train on the GPUs of the engines, in turns; only with async_ratio = 0")
    epochs: float = Field(1.0, gt=0, description="passes over each batch")
    seconds_per_version: float = Field(
        0.0, ge=0, description="seconds for each version, whatever its batch: publishing, the optimizer"
    )
    seconds_per_trajectory: float = Field(0.0, ge=0, description="seconds of one GPU for each trajectory")
    seconds_per_token: float = Field(0.0, ge=0, description="seconds of one GPU for each response token")
    measured: tuple[float, ...] = Field(
        (), description="measured seconds of whole steps, one after another; they replace the formula"
    )


class UpdateHardware(Section):
    """The time to bring a new version to the engines."""

    seconds: float = Field(0.0, ge=0, description="seconds that every engine pauses")
    fetch_seconds: float = Field(0.0, ge=0, description="seconds before the pause, while the engines go on")


class EngineDeath(Section):
    """The death of one engine."""

    at_seconds: float = Field(ge=0, description="seconds from the start of the run")
    engine: int = Field(ge=0, description="number of the engine, from 0")


class FaultsHardware(Section):
    """Faults: engines that die and are replaced, and engines that are slow."""

    deaths: tuple[EngineDeath, ...] = ()
    deaths_per_hour: float = Field(0.0, ge=0, description="random deaths of each engine per hour")
    restart_seconds: float = Field(30.0, ge=0, description="seconds until a dead engine is replaced")
    slow_share: float = Field(0.0, ge=0, le=1, description="share of engines that are always slow")
    slow_factor: float = Field(1.0, ge=1, description="factor by which a slow engine is slower")


class Hardware(Section):
    """One hardware file."""

    keys_page: ClassVar[str] = "`rollflow keys --hardware`"
    renames: ClassVar[Renames] = HARDWARE

    title: str = Field("", description="title of figures and timelines")
    engines: EnginesHardware = EnginesHardware()
    responses: ResponsesHardware = ResponsesHardware()
    reward: RewardHardware = RewardHardware()
    learner: LearnerHardware = LearnerHardware()
    update: UpdateHardware = UpdateHardware()
    faults: FaultsHardware = FaultsHardware()

    def gpus(self, config: RunConfig) -> float:
        """Return the number of GPUs: the engines' and the learner's."""
        learner = 0.0 if self.learner.colocated else self.learner.gpus
        return self.engine_count(config) * self.engines.gpus_per_engine + learner

    def engine_count(self, config: RunConfig) -> int:
        """Return the number of engines for this recipe."""
        return self.engines.count or config.engine.replicas

    def cap(self, config: RunConfig) -> int:
        """Return the length of the longest response, in tokens."""
        return self.responses.cap or config.engine.max_new_tokens

    def engine(self, config: RunConfig) -> TimedEngineConfig:
        """Build the recipe's engine section for timed engines of this hardware (at speed 1)."""
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
        """Draw each engine's speed, relative to the file's seconds."""
        draw, engines, faults = random.Random(f"speeds {config.seed}"), self.engines, self.faults
        found = []
        for place in range(self.engine_count(config)):
            spread = math.exp(engines.speed_spread * draw.gauss(0.0, 1.0))
            slow = faults.slow_factor if draw.random() < faults.slow_share else 1.0
            found.append((engines.speeds[place] if place < len(engines.speeds) else spread) / slow)
        return found

    def train_seconds(self, version: int, trajectories: float, tokens: float) -> float:
        """Compute the seconds to train `version` on this many trajectories and response tokens."""
        learner = self.learner
        if learner.measured:
            return learner.measured[(version - 1) % len(learner.measured)]
        work = trajectories * learner.seconds_per_trajectory + tokens * learner.seconds_per_token
        return learner.seconds_per_version + learner.epochs * work / learner.gpus
