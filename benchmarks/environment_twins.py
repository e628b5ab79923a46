"""Compares the simulator's ratio of lock-step to asynchronous episodes with the ratio that Ray actors measure.

A *twin* is a workload of `benchmarks.environments` with fewer environments; all its times are divided by a scale. The
same twin runs on the virtual clock and in real time. In real time, the scheduler, the episodes, the proxy and the
channel are the same objects, and the timed engines are Ray actors that are called remotely. Messages add some
milliseconds to each generation. The table says by which share turns became longer. With a smaller scale, this share is
smaller, but the measurement takes longer.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.environment_workloads import ALFWORLD, SECONDS_PER_TOKEN, Episodes, gaussian
from benchmarks.lockstep import LockstepEnvironment, LockstepRun
from benchmarks.report import Row, at_most
from benchmarks.wall_clock import TOLERANCE, WallWorld, engine_actors, measured, start_ray
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import SimulatedRun, simulate

ENGINES = 2
SEEDS = 2
WARM_UP = 1  # number of first steps that are not counted, in addition to `alpha` steps
OVERHEAD = 0.02  # largest share by which messages and busy cores may lengthen a turn
STRETCHED = ("step_seconds", "reset_seconds")  # config keys in seconds, whatever the distribution is
SPREADS = ("step_sigma", "reset_sigma")  # config keys that are in seconds only if the distribution is Gaussian


@dataclass(slots=True)
class TurnTimes:
    """The seconds that were drawn for generations and for steps of the environment, and the seconds that they really
    took.
    """

    drawn: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    took: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, what: str, drawn: float, took: float) -> None:
        """Count a generation or a step."""
        self.drawn[what] += drawn
        self.took[what] += took


class ClockedEnvironment(TimedEnvironment):
    """A timed environment that compares the times of its generations and steps with the drawn times."""

    pace = 0.0  # seconds of a token

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.times = TurnTimes()

    async def ask(self, episode: Episode, limit: int | None) -> Generation | None:
        began = asyncio.get_running_loop().time()
        made = await super().ask(episode, limit)
        if made is not None:
            self._count("generations", began, len(made.made) * self.pace)
        return made

    async def work(self, seconds: float) -> None:
        began = asyncio.get_running_loop().time()
        await super().work(seconds)
        self._count("steps", began, seconds)

    def _count(self, what: str, began: float, drawn: float) -> None:
        self.times.add(what, drawn, asyncio.get_running_loop().time() - began)


class ClockedLockstep(LockstepEnvironment, ClockedEnvironment):
    """An environment in lock-step that measures its generations and steps, without the waits for other episodes."""


class ClockedRun(WallWorld):
    """Asynchronous episodes in real time."""

    environment_type = ClockedEnvironment

    def _build_environment(self) -> Environment:
        built = super()._build_environment()
        assert isinstance(built, ClockedEnvironment)
        built.pace = self.engine.tokens_per_tick * self.engine.seconds_per_token
        self.times = built.times
        return built


class ClockedLockstepRun(ClockedRun, LockstepRun):
    """Episodes in lock-step in real time."""

    lockstep_type = ClockedLockstep


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of the workload `work` with fewer environments, whose times are divided by `scale`."""

    work: Episodes
    scale: float
    groups: int
    size: int

    def shrink(self) -> Episodes:
        """Return the workload of the twin."""
        keys = dict(self.work.environment)
        is_gaussian = keys.get("distribution", "gaussian") == "gaussian"
        for key in (*STRETCHED, *(SPREADS if is_gaussian else ())):
            if key in keys:
                keys[key] /= self.scale
        count = self.groups * self.size
        engines = {"count": ENGINES, "max_concurrent_requests": -(-count // ENGINES)}
        return replace(
            self.work,
            name=f"{self.work.name}, {count} environments, 1:{self.scale:g}",
            groups=self.groups,
            size=self.size,
            environment=keys,
            train_seconds=self.work.train_seconds / self.scale,
            engines={**engines, "seconds_per_token": SECONDS_PER_TOKEN / self.scale},
        )


TWINS = (Twin(gaussian(10), 50, 8, 4), Twin(ALFWORLD, 20, 8, 4))


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two schedules (lock-step or asynchronous episodes) that are compared."""

    alpha: float
    simulated: type[SimulatedRun]
    real: type[ClockedRun]
    versions: int

    def plan(self, work: Episodes, seed: int) -> RunConfig:
        """Return the recipe of the schedule."""
        return work.recipe(self.alpha).model_copy(update={"seed": seed})

    @property
    def warm(self) -> int:
        """The number of first steps that are not counted."""
        return WARM_UP + int(self.alpha)


@dataclass(slots=True)
class Steps:
    """The seconds of the counted train steps of one schedule, on the virtual clock and in real time, and the times of
    its turns.
    """

    virtual: list[float]
    real: list[float]
    times: list[TurnTimes]


async def measure_side(side: Side, work: Episodes, hardware: Hardware, seeds: int, actors: Sequence[Any]) -> Steps:
    """Run a schedule in real time and on the virtual clock, once for each seed."""
    found = Steps([], [], [])
    for seed in range(seeds):
        config = side.plan(work, seed)
        world = side.real(config, hardware, side.versions, actors)
        found.real += (await measured(world, side.versions))[side.warm :]
        found.times.append(world.times)
        planned = await asyncio.to_thread(simulate, config, hardware, versions=side.versions, world_type=side.simulated)
        found.virtual += planned.figures.steps[side.warm :]
    return found


def compare_twin(twin: Twin, versions: int, seeds: int) -> Iterator[Row]:
    """Yield the step times of lock-step and of asynchronous episodes, and their ratio, in the simulation and in real
    time. Ray must be running.
    """
    work = twin.shrink()
    hardware, names = work.hardware(), ("lock-step", "asynchronous episodes, alpha 1")
    sides = (
        Side(0, LockstepRun, ClockedLockstepRun, max(WARM_UP + 1, versions // 3)),
        Side(1, SimulatedRun, ClockedRun, versions),
    )
    with engine_actors(hardware.engine(sides[0].plan(work, 0)), ENGINES) as actors:
        found = [asyncio.run(measure_side(side, work, hardware, seeds, actors)) for side in sides]
    for name, steps in zip(names, found, strict=True):
        yield Row(work.name, f"{name}: step seconds, simulated", statistics.fmean(steps.virtual))
        yield Row(work.name, f"{name}: step seconds, real", statistics.fmean(steps.real))
        yield from build_overheads(work.name, name, steps.times)
    together, alone = found
    predicted = statistics.fmean(together.virtual) / statistics.fmean(alone.virtual)
    real = statistics.fmean(together.real) / statistics.fmean(alone.real)
    yield Row(work.name, "asynchronous over lock-step, simulated", predicted)
    yield Row(work.name, "asynchronous over lock-step, real", real)
    yield at_most(work.name, "the ratios differ by (%)", 100 * abs(real / predicted - 1.0), 100 * TOLERANCE)


def build_overheads(case: str, name: str, times: Sequence[TurnTimes]) -> Iterator[Row]:
    """Yield rows that say by how many per cent generations and steps took longer than their drawn times."""
    for what in ("generations", "steps"):
        drawn, took = (sum(getattr(one, part)[what] for one in times) for part in ("drawn", "took"))
        yield Row(case, f"{name}: {what} longer than drawn, %", 100 * (took / drawn - 1.0))
    drawn, took = (sum(sum(getattr(one, part).values()) for one in times) for part in ("drawn", "took"))
    yield at_most(case, f"{name}: turns longer than drawn, %", 100 * (took / drawn - 1.0), 100 * OVERHEAD)


def compare_twins(versions: int) -> Iterator[Row]:
    """Compare the simulated ratio of each twin with the ratio in real time."""
    with start_ray():
        for twin in TWINS:
            yield from compare_twin(twin, versions, SEEDS if versions > 3 else 1)
