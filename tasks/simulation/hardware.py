"""What a simulation assumes about machines and workload: one TOML file, typed and frozen.

Seconds are those of one engine, one worker or one GPU; lengths are response tokens. Imports only pydantic.
"""

from __future__ import annotations

import math
import random
from typing import Self

from pydantic import Field, model_validator

from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section, refuse

GRAINS = 128  # simulated tokens of the longest response: enough to show versions per token, in short arrays


class EnginesHardware(Section):
    """The engines and their decoding speed."""

    count: int | None = Field(None, gt=0, description="engines; default: the recipe's engine.replicas")
    slots: int | None = Field(None, gt=0, description="requests on one engine; default: the recipe's engine.slots")
    gpus_per_engine: float = Field(1.0, gt=0, description="GPUs that one engine takes")
    seconds_per_token: float = Field(0.01, gt=0, description="of a request that runs alone")
    prefill_seconds: float = Field(0.0, ge=0, description="of a prompt; again after each update")
    prefill_seconds_per_token: float = Field(
        0.0, ge=0, description="that an engine is held up by each token of a prompt; of all it holds, after each update"
    )
    slowing: float = Field(0.0, ge=0, description="c: with n requests running each decodes at 1/(1 + c(n - 1) + r t)")
    reading: float = Field(0.0, ge=0, description="r: of each of the t tokens in the KV cache")
    kv_tokens: int | None = Field(
        None, gt=0, description="tokens the KV cache holds; when it is full the last request to start makes room"
    )
    speeds: tuple[float, ...] = Field((), description="of the first engines, relative to the seconds above")
    speed_spread: float = Field(0.0, ge=0, description="spread of the other engines' lognormal speeds (median 1)")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(speed <= 0 for speed in self.speeds):
            refuse("engines.speeds", list(self.speeds), "every speed must be above 0")
        return self


class ResponsesHardware(Section):
    """The lengths of responses: lognormal or measured."""

    median: float = Field(1000.0, gt=0, description="median length in tokens")
    sigma: float = Field(1.0, ge=0, description="spread of the lognormal length")
    prompt_tokens: int = Field(0, ge=0, description="of a prompt, in the KV cache")
    cap: int | None = Field(None, gt=0, description="longest response; default: the recipe's engine.max_new_tokens")
    correlation: float = Field(0.7, ge=0, le=1, description="rho of the lengths of responses to one prompt")
    lengths: tuple[int, ...] = Field((), description="measured lengths, in place of the lognormal ones")
    grain: int | None = Field(None, gt=0, description="tokens that one simulated token stands for; default: cap / 128")


class RewardHardware(Section):
    """The time and the accuracy of scores."""

    seconds: float = Field(0.0, ge=0, description="mean time of a verdict")
    sigma: float = Field(0.0, ge=0, description="spread of its lognormal time; 0: always the mean")
    measured: tuple[float, ...] = Field((), description="measured times, in place of the lognormal ones")
    workers: int | None = Field(None, gt=0, description="verdicts at a time; default: as many as there are responses")
    accuracy: float = Field(0.5, ge=0, le=1, description="share of right answers")
    agreeing: float = Field(0.0, ge=0, le=1, description="share of prompts whose answers are all right or all wrong")


class LearnerHardware(Section):
    """The time of a train step: seconds + epochs x (per_trajectory x trajectories + per_token x tokens) / gpus."""

    gpus: float = Field(1.0, gt=0, description="GPUs that train")
    colocated: bool = Field(False, description="on the engines' own GPUs, taking turns: only at async_ratio = 0")
    epochs: float = Field(1.0, gt=0, description="times that a batch is trained on")
    seconds_per_version: float = Field(0.0, ge=0, description="whatever the batch: publishing, the optimizer")
    seconds_per_trajectory: float = Field(0.0, ge=0, description="of one GPU")
    seconds_per_token: float = Field(0.0, ge=0, description="of one GPU, per response token")
    measured: tuple[float, ...] = Field((), description="measured seconds of whole steps, one after another, instead")


class UpdateHardware(Section):
    """The time to bring a new version to the engines."""

    seconds: float = Field(0.0, ge=0, description="pause of every engine")
    fetch_seconds: float = Field(0.0, ge=0, description="before it, while the engines go on")


class EngineDeath(Section):
    """The death of one engine."""

    at_seconds: float = Field(ge=0, description="when it dies, from the beginning of the run")
    engine: int = Field(ge=0, description="its number, from 0")


class FaultsHardware(Section):
    """Faults: engines that die and are replaced, and engines that are slow."""

    deaths: tuple[EngineDeath, ...] = ()
    deaths_per_hour: float = Field(0.0, ge=0, description="of one engine, at random")
    restart_seconds: float = Field(30.0, ge=0, description="until another engine is in a dead one's place")
    slow_share: float = Field(0.0, ge=0, le=1, description="share of engines that are slow throughout")
    slow_factor: float = Field(1.0, ge=1, description="how many times slower they are")


class Hardware(Section):
    """One hardware file."""

    title: str = Field("", description="what figures and timelines are headed with")
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
        grain = responses.grain or max(1, cap // GRAINS)
        return TimedEngineConfig(
            replicas=self.engine_count(config),
            slots=engines.slots or config.engine.slots,
            max_new_tokens=math.ceil(cap / grain),
            temperature=config.engine.temperature,
            in_flight=config.engine.in_flight,
            median_tokens=responses.median,
            sigma=responses.sigma,
            correlation=responses.correlation,
            lengths=responses.lengths,
            seconds_per_token=engines.seconds_per_token,
            prefill_seconds=engines.prefill_seconds,
            update_seconds=self.update.seconds,
            slowing=engines.slowing,
            reading=engines.reading,
            kv_tokens=engines.kv_tokens,
            prompt_tokens=responses.prompt_tokens,
            prefill_seconds_per_token=engines.prefill_seconds_per_token,
            grain=grain,
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
