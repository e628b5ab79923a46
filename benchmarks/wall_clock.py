"""Compares the simulated step times of a small workload with its real step times on timed engines in Ray actors.

Simulation and real runs use the same scheduler, proxy, controller, channel, timed rewards and learner. In the real
runs, the engines are Ray actors that are called remotely. The benchmark compares the ratios of step times between
scheduling policies, with runs in turns. Run it as `python -m benchmarks.wall_clock`; it takes about four minutes.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

from benchmarks.baselines import BatchRun
from benchmarks.report import Row, arguments, publish
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.proxy import WeightsProbe
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.records import Snapshot
from rollflow.tasks.simulation.world import SimulatedRun, simulate

ENGINES = 2
WARM_UP = 2  # number of warm-up versions, in addition to `alpha` versions
VERSIONS = 7  # versions of a synchronous run; an asynchronous run trains twice as many, because its steps are shorter
TOLERANCE = 0.1
HARDWARE = Hardware.model_validate(
    {
        "engines": {
            "count": ENGINES,
            "max_concurrent_requests": 4,
            "seconds_per_token": 0.005,
            "prefill_seconds": 0.02,
        },
        "responses": {"median": 100.0, "sigma": 0.7, "cap": 360, "correlation": 0.5},
        "reward": {"seconds": 0.25, "workers": 4},
        "learner": {"seconds_per_version": 0.3},
        "update": {"seconds": 0.02},
    }
)
RATIOS = {  # name -> (first case, second case); the ratio is the first case's step time divided by the second's
    "asynchronous / synchronous": ("queue, alpha = 2", "queue, alpha = 0"),
    "queue / batch": ("queue, alpha = 0", "batch, alpha = 0"),
}
Steps = Mapping[str, Sequence[float]]  # case -> seconds of each step after the warm-up


class NoWeights:
    """A `WeightsSource` for engines that read no weights."""

    patience = None

    def weights(self, version: int) -> Path:
        """Return no weights."""
        return Path()


class WallWorld(SimulatedRun):
    """A run of the simulated world in real time. Its engines are in Ray actors, which outlive this object."""

    def __init__(self, recipe: RunConfig, hardware: Hardware, versions: int, actors: Sequence[Any]) -> None:
        """Create a run of `versions` versions, with a few more batches in flight, as `simulate` does."""
        self._actors = actors
        planned = {"engine": hardware.engine(recipe), "versions": versions + recipe.capacity + 1}
        super().__init__(recipe.model_copy(update=planned), hardware, recipe, timeline=False)

    async def fetch(self, version: int) -> tuple[Any, WeightsProbe]:
        """Fetch a version without weights."""
        return NoWeights(), (await super().fetch(version))[1]

    def _engine(self, place: int) -> Any:
        return RayEngine(self._actors[place], name=f"engine-{place}")

    def _snapshot(self) -> Snapshot:
        """Take no snapshot of the engines, which are in actors."""
        return Snapshot(asyncio.get_running_loop().time(), 0.0, 0.0, 0, 0.0)

    async def _close(self) -> None:
        """Stop starting requests; the next run uses the actors again."""
        for engine in self.engines.values():
            await engine.suspend("restart")


class WallBatchRun(WallWorld, BatchRun):
    """A run in real time that generates one batch after the other."""


# case -> alpha, the simulated run with the case's scheduler, and the run in real time
CASES: dict[str, tuple[float, type[SimulatedRun], type[WallWorld]]] = {
    "batch, alpha = 0": (0.0, BatchRun, WallBatchRun),
    "queue, alpha = 0": (0.0, SimulatedRun, WallWorld),
    "queue, alpha = 2": (2.0, SimulatedRun, WallWorld),
}


def recipe(case: str, seed: int) -> RunConfig:
    """Return a recipe with 12 responses per step, on 8 slots."""
    alpha, *_ = CASES[case]
    return RunConfig(groups=6, group_size=2, seed=seed, policy=PolicyConfig(path="none"), async_ratio=alpha)


def simulated(case: str, config: RunConfig, versions: int) -> list[float]:
    """Return the seconds of each step on the virtual clock."""
    return list(simulate(config, HARDWARE, versions=versions, world_type=CASES[case][1]).figures.steps)


async def measured(world: WallWorld, versions: int) -> list[float]:
    """Return the seconds of each step in real time."""
    began = asyncio.get_running_loop().time()
    await world.run(versions, lambda version: None)
    ends = [began, *(step.ended for step in world.records.steps)]
    return [after - before for before, after in pairwise(ends)]


@contextmanager
def start_ray() -> Iterator[None]:
    """Start Ray on this machine, and end it after the block."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def engine_actors(config: EngineConfig | None = None, count: int = ENGINES) -> Iterator[list[Any]]:
    """Create timed engines, each in its own actor; Ray must be running."""
    config = config or HARDWARE.engine(recipe("queue, alpha = 0", 0))
    actors = [RayEngine.spawn(config, None).actor for _ in range(count)]
    try:
        ray.get([actor.health.remote() for actor in actors])
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


async def by_turns(versions: int, seeds: Sequence[int], actors: Sequence[Any]) -> tuple[Steps, Steps]:
    """Run all cases in turns, once per seed, in real time and simulated."""
    wall: dict[str, list[float]] = {case: [] for case in CASES}
    virtual: dict[str, list[float]] = {case: [] for case in CASES}
    for seed in seeds:
        for case in CASES:
            config = recipe(case, seed)
            count, warm = (versions, WARM_UP) if config.async_ratio == 0 else (2 * versions, WARM_UP + config.capacity)
            wall[case] += (await measured(CASES[case][2](config, HARDWARE, count, actors), count))[warm:]
            virtual[case] += (await asyncio.to_thread(simulated, case, config, count))[warm:]
    return wall, virtual


def ratios(steps: Steps) -> dict[str, float]:
    """Return the ratios by their names in `RATIOS`."""
    mean = {case: statistics.fmean(seconds) for case, seconds in steps.items()}
    return {name: mean[one] / mean[other] for name, (one, other) in RATIOS.items()}


def rows(wall: Steps, virtual: Steps) -> list[Row]:
    """Return rows with step times, their ratios, and the differences between real time and simulation."""
    found = []
    for case in CASES:
        on_wall, in_simulation = statistics.fmean(wall[case]), statistics.fmean(virtual[case])
        found.append(Row(case, "step seconds, wall", on_wall))
        found.append(Row(case, "step seconds, simulated", in_simulation))
        found.append(Row(case, "wall / simulated", on_wall / in_simulation))
    for name, on_wall in ratios(wall).items():
        in_simulation = ratios(virtual)[name]
        apart = abs(on_wall / in_simulation - 1)
        found.append(Row(name, "ratio of step times, wall", on_wall))
        found.append(Row(name, "ratio of step times, simulated", in_simulation))
        found.append(Row(name, "they differ by (%)", 100 * apart, 100 * TOLERANCE, apart <= TOLERANCE))
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--versions", type=int, default=2 * VERSIONS)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    with start_ray(), engine_actors() as actors:
        found = rows(*asyncio.run(by_turns(options.versions, range(options.turns), actors)))
    publish(found, "The simulator against the wall clock, on timed engines in Ray actors", options.json)


if __name__ == "__main__":
    main()
