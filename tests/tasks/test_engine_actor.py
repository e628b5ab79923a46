"""The Ray side of engines: what travels arrives unchanged, a new owner takes over, busy time is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.engines.actor import RayEngine
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.engines.wire import pack_generations, pack_requests, unpack_generations, unpack_requests
from rollflow.tasks.settings import TimedEngineConfig, TransformersEngineConfig
from tests.support.tiny_policy import make_policy

TIMED = TimedEngineConfig(median_tokens=1000, sigma=0.0, seconds_per_token=0.01, update_seconds=0.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_what_travels_arrives_unchanged() -> None:
    requests = [GenerationRequest("a", (1, 2), 3, 0.7, 5), GenerationRequest("b", (9,), 4, 1.0, None)]
    assert unpack_requests(pack_requests(requests)) == requests
    generations = [
        Generation("a", (1, 2), (-0.1, -1e-9), (0, 1), Ending.STOP),
        Generation("b", (), (), (), Ending.ABORTED),
        Generation("c", (7,), (-3.5,), (2,), Ending.LENGTH),
    ]
    assert unpack_generations(pack_generations(generations)) == generations
    assert unpack_generations(pack_generations([])) == []


@pytest.mark.slow
async def test_a_new_owner_takes_over(cluster: None) -> None:
    """As after the death of the process that held the first one: its requests end, their ids are free again."""
    first = RayEngine.spawn(TIMED, None)
    await first.start()
    old = asyncio.create_task(first.generate(GenerationRequest("same-id", (3,), 500, seed=1)))
    await asyncio.sleep(0.2)
    second = RayEngine(first.actor)
    await second.suspend("restart")
    await second.update(4, __file__)  # type: ignore[arg-type]  # the timed engine reads no weights
    await second.resume()
    new = await second.generate(GenerationRequest("same-id", (3,), 10, seed=2))
    assert new.versions == (4,) * 10
    with pytest.raises(EngineFailed, match="taken this engine over"):
        await asyncio.wait_for(old, 10)
    assert (await second.stats()).running == 0
    await second.close()


@pytest.mark.slow
async def test_busy_time_is_time_with_something_to_run(cluster: None) -> None:
    engine = RayEngine.spawn(TIMED, None)
    await engine.start()
    await asyncio.sleep(0.3)
    assert (await engine.stats()).busy_seconds == 0
    task = asyncio.create_task(engine.generate(GenerationRequest("a", (3,), 40, seed=1)))
    await asyncio.sleep(0.1)
    await engine.suspend("continue")
    await asyncio.sleep(0.5)
    await engine.resume()
    await task
    stats = await engine.stats()
    assert stats.running == 0
    assert stats.tokens == 40
    assert 0.35 < stats.busy_seconds < 0.6
    await engine.close()


@pytest.mark.slow
async def test_a_bad_request_fails_alone(cluster: None, tmp_path: object) -> None:
    engine = RayEngine.spawn(TransformersEngineConfig(), make_policy(tmp_path / "policy"))  # type: ignore[operator]
    await engine.start()
    good, bad = await asyncio.gather(
        engine.generate(GenerationRequest("good", (3,), 4)),
        engine.generate(GenerationRequest("bad", (), 4)),
        return_exceptions=True,
    )
    assert isinstance(bad, ValueError)
    assert isinstance(good, Generation)
    await engine.close()


async def test_a_timed_response_is_a_function_of_its_seed() -> None:
    config = TimedEngineConfig(median_tokens=16, sigma=1.0, seconds_per_token=0.0001)
    engines = [TimedEngine(config), TimedEngine(config)]
    requests = [GenerationRequest(f"r{i}", (3,), 64, seed=i) for i in range(200)]
    one = await asyncio.gather(*map(engines[0].generate, requests))
    two = await asyncio.gather(*map(engines[1].generate, reversed(requests)))
    assert one == two[::-1]
    lengths = sorted(len(generation.tokens) for generation in one)
    assert 12 <= lengths[100] <= 20
    assert {generation.ending for generation in one} == {Ending.STOP, Ending.LENGTH}
    assert all((g.ending is Ending.LENGTH) <= (len(g.tokens) == 64) for g in one)
