"""Defines the simulated parts of a run: prompts, scorers, the learner, and planned failures of engines. A simulated
part takes time, but makes no scheduling decision.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping

from rollflow.storage.channel import Channel
from rollflow.storage.errors import EngineFailed, Stale
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.simulation.hardware import FaultsHardware, Hardware, RewardHardware
from rollflow.tasks.simulation.records import Gauge, SimulationRecords, Span, trajectories_of

FOREVER = 1e12  # virtual seconds, more than any simulation takes
JOIN_SECONDS = 1.0  # seconds before the next try to replace a dead engine


class SimulatedPrompts:
    """Simulated prompts without text; each prompt has a number, a source, and a chance that a response is correct."""

    def __init__(self, config: RunConfig, reward: RewardHardware) -> None:
        self._seed, self._reward = config.seed, reward
        self._sources = len(config.prompts)

    def at(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        draw = random.Random(f"{self._seed} {index}")
        accuracy = self._reward.accuracy
        if draw.random() < self._reward.agreeing:
            accuracy = float(draw.random() < accuracy)
        domain = f"source-{index % self._sources}"
        return Prompt(f"p{index}", index, domain, "", ModelInput.of(self.tokens(index)), {"accuracy": accuracy})

    @staticmethod
    def tokens(index: int) -> tuple[int, ...]:
        """Return the only token of a question: its index."""
        return (index,)


class TimedRewards:
    """Scores responses after a simulated time, at most `workers` responses at a time."""

    def __init__(self, reward: RewardHardware, seed: int, records: SimulationRecords) -> None:
        self._reward, self._records = reward, records
        self._draw = random.Random(f"rewards {seed}")
        self._room = asyncio.Semaphore(reward.workers) if reward.workers else None
        self.gauge = Gauge()

    async def score(self, request: ScoreRequest) -> Score:
        """Score one response."""
        self._records.last_generation = asyncio.get_running_loop().time()
        if self._room is None:
            await self._judge()
        else:
            async with self._room:
                await self._judge()
        right = self._draw.random() < request.reference["accuracy"]
        return Score(float(right), "right" if right else "wrong")

    async def _judge(self) -> None:
        if seconds := self._seconds():
            self.gauge.change(1)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.gauge.change(-1)

    def _seconds(self) -> float:
        """Draw the time of one score in seconds, from a lognormal distribution or from the measured times."""
        reward = self._reward
        if reward.measured:
            return self._draw.choice(reward.measured)
        if not reward.sigma:
            return reward.seconds
        return reward.seconds * math.exp(reward.sigma * self._draw.gauss(0.0, 1.0) - reward.sigma**2 / 2)


class Memory:
    """Keeps the committed batches of a simulation in memory until they are trained on."""

    def __init__(self) -> None:
        self.batches: dict[int, StagedBatch] = {}

    async def entry(self, number: int) -> int | None:
        """Return the same log entry for every batch, because a simulation has no log."""
        return 0 if number in self.batches else None

    async def read(self, number: int) -> StagedBatch:
        """Return a batch."""
        return self.batches[number]


def check_fresh(staged: StagedBatch, async_ratio: float) -> None:
    """Raise `Stale` if a group of responses is too old for its batch, as the log of a real run does."""
    oldest = min(group.started_version for group in staged.groups)
    if oldest < staged.number - async_ratio:
        raise Stale(
            f"a group was started under version {oldest}, but with async_ratio = {async_ratio:g} batch "
            f"{staged.number} takes only groups that were started under version {staged.number - async_ratio:g} "
            "or newer"
        )


class TimedLearner:
    """A simulated learner, which takes one batch after another and spends the time of a train step on each batch."""

    def __init__(
        self,
        hardware: Hardware,
        grain: int,
        channel: Channel[StagedBatch],
        records: SimulationRecords,
        spend: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create the learner; `spend` waits for the duration of a train step that takes the given seconds without
        engines.
        """
        self._hardware, self._grain, self._spend = hardware, grain, spend
        self._channel, self._records = channel, records

    async def run(self, versions: int, published: Callable[[int], None]) -> None:
        """Train policy versions 1 to `versions`."""
        clock = asyncio.get_running_loop().time
        await self._channel.announce(0)
        for version in range(1, versions + 1):
            batch = await self._channel.lease(version - 1, FOREVER)
            began = clock()
            tokens = sum(group.response_tokens for group in batch.groups) * self._grain
            await self._spend(self._hardware.train_seconds(version, len(trajectories_of(batch)), tokens))
            await self._channel.ack(version - 1)
            self._records.steps.append(Span(began, clock(), version))
            published(version)
            await self._channel.announce(version)


class Faults:
    """Kills simulated engines at planned or random times and replaces them."""

    def __init__(
        self,
        faults: FaultsHardware,
        proxy: InferenceProxy,
        engines: Mapping[int, TimedEngine],
        replace: Callable[[int], Awaitable[TimedEngine]],
        records: SimulationRecords,
    ) -> None:
        self._faults, self._proxy, self._engines = faults, proxy, engines
        self._replace, self._records = replace, records

    async def run(self, seed: int) -> None:
        """Kill simulated engines at all planned and random times."""
        async with asyncio.TaskGroup() as tasks:
            for death in self._faults.deaths:
                tasks.create_task(self._die(death.at_seconds, death.engine))
            if self._faults.deaths_per_hour:
                for place in self._engines:
                    tasks.create_task(self._mortal(place, random.Random(f"deaths {seed} {place}")))

    async def _mortal(self, place: int, draw: random.Random) -> None:
        while True:
            await self._die(draw.expovariate(self._faults.deaths_per_hour / 3600.0), place)

    async def _die(self, seconds: float, place: int) -> None:
        """Kill a simulated engine after `seconds`; return when the engine's replacement serves requests."""
        await asyncio.sleep(seconds)
        self._engines[place].kill("killed by the simulation")
        self._records.deaths += 1
        await asyncio.sleep(self._faults.restart_seconds)
        while True:
            try:
                await self._proxy.join(place, await self._replace(place))
                return
            except EngineFailed:
                await asyncio.sleep(JOIN_SECONDS)
