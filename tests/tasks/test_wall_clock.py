"""A simulated run, executed on a real clock with real actors, forms batches as in simulation.

`benchmarks/wall_clock.py` measures how long a real step takes, and whether the simulator predicts this time. A test
cannot distinguish a wrong simulator from a busy machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.environment_twins import ENGINES, ClockedLockstepRun, Twin
from benchmarks.environment_workloads import gaussian
from benchmarks.lockstep import LockstepRun
from benchmarks.wall_clock import CASES, HARDWARE, engine_actors, recipe
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.records import FormedBatch
from rollflow.tasks.simulation.world import SimulatedRun

VERSIONS = 3


@pytest.fixture(scope="module")
def actors(ray_node: None) -> Iterator[list[Any]]:
    with engine_actors() as found:
        yield found


async def formed(world: SimulatedRun) -> list[FormedBatch]:
    await world.run(VERSIONS, lambda version: None)
    return world.records.formed[:VERSIONS]


def planned(config: RunConfig, hardware: Hardware = HARDWARE) -> RunConfig:
    return config.model_copy(update={"engine": hardware.engine(config), "versions": VERSIONS + config.capacity + 1})


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.soak) if "batch" in name or "= 0" in name else name for name in CASES]
)
def test_run_trains_the_same_on_real_and_virtual_clock(actors: list[Any], case: str) -> None:
    config, (_, simulated, real) = recipe(case, 0), CASES[case]
    wall = asyncio.run(formed(real(config, HARDWARE, VERSIONS, actors)))
    virtual = run_virtual(formed(simulated(planned(config), HARDWARE, config, timeline=False)))
    assert [batch.trajectories for batch in wall] == [12] * VERSIONS
    assert max(staleness for batch in wall for staleness in batch.staleness) <= config.async_ratio
    if config.async_ratio == 0:  # otherwise timing decides which groups come first
        assert [batch.tokens for batch in wall] == [batch.tokens for batch in virtual]
    else:
        assert any(staleness > 0 for batch in wall for staleness in batch.staleness)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_lockstep_run_is_equal_on_real_and_virtual_clock(ray_node: None) -> None:
    work = Twin(gaussian(10), 500, 2, 2).shrink()
    config, hardware = work.recipe(0), work.hardware()
    with engine_actors(hardware.engine(config), ENGINES) as actors:
        world = ClockedLockstepRun(config, hardware, VERSIONS, actors)
        wall = asyncio.run(formed(world))
    virtual = run_virtual(formed(LockstepRun(planned(config, hardware), hardware, config, timeline=False)))
    assert [(batch.trajectories, batch.tokens) for batch in wall] == [(b.trajectories, b.tokens) for b in virtual]
    assert [batch.trajectories for batch in wall] == [4] * VERSIONS
    assert all(world.times.took[what] > world.times.drawn[what] > 0.0 for what in ("generations", "steps"))
