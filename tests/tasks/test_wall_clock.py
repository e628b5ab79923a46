"""What the simulator says of ways to schedule holds on a wall clock: the ratios of step times agree within a tenth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from benchmarks.wall_clock import TOLERANCE, VERSIONS, by_turns, engine_actors, ratios


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with engine_actors() as found:
        yield found
    ray.shutdown()


@pytest.mark.slow
def test_timed_engines_in_actors_take_the_time_that_was_simulated(actors: list[Any]) -> None:
    apart: dict[str, float] = {}
    for seed in (0, 1):  # a second time because another process may take both cores for a second, in one case alone
        wall, virtual = map(ratios, asyncio.run(by_turns(VERSIONS, [seed], actors)))
        assert virtual["asynchronous / synchronous"] < 0.7  # there is something to agree on
        assert virtual["queue / batch"] < 0.9
        apart = {name: wall[name] / virtual[name] - 1 for name in virtual}
        if all(abs(difference) <= TOLERANCE for difference in apart.values()):
            return
    raise AssertionError(f"wall clock and simulation differ: {apart}")
