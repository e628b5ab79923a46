"""Tests of engines in Ray actors: messages arrive unchanged, a new owner takes over, requests of a dead or stuck actor
continue on another engine, and busy time is counted.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
import ray

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ForeignPart, ModelInput
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.actors.wire import (
    pack_generations,
    pack_partials,
    pack_requests,
    unpack_generations,
    unpack_partials,
    unpack_requests,
)
from rollflow.tasks.engines.base import DraftCounts, Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig, TransformersEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from tests.support.here import Here
from tests.support.tiny_policy import make_policy, make_weights
from tests.support.waiting import HANG_SECONDS, soon

pytestmark = pytest.mark.xdist_group("ray")
TIMED = TimedEngineConfig(median_tokens=1000, sigma=0.0, seconds_per_token=0.01, update_seconds=0.0)


def test_engine_messages_are_unchanged_after_packing() -> None:
    prefix = TokenSpan.of((4, 5), (-0.5, -1e-9), (0, 3))
    stops = GenerationRequest("b", ModelInput.of((9,)), 4, 1.0, None, prefix, ("\n", "end"))
    requests = [GenerationRequest("a", ModelInput.of((1, 2)), 3, 0.7, 5), stops]
    assert unpack_requests(pack_requests(requests)) == requests
    image = ForeignPart("image", "5e" * 32, 4)
    mixed = ModelInput.from_parts([Int32s.of((1,)), image, image, Int32s.of((2, 3))])
    requests.insert(1, GenerationRequest("c", mixed, 3))
    assert unpack_requests(pack_requests(requests)) == requests
    generations = [
        Generation("a", TokenSpan.of((1, 2), (-0.1, -1e-9), (0, 1)), StopReason.STOP, 3),
        Generation("b", TokenSpan(), StopReason.ABORTED),
        Generation("c", TokenSpan.of((7,), (-3.5,), (2,)), StopReason.LENGTH, drafts=DraftCounts(1, 4, 2)),
    ]
    assert unpack_generations(pack_generations(generations)) == generations
    assert unpack_generations(pack_generations([])) == []
    partials = {"a": prefix, "b": TokenSpan()}
    assert unpack_partials(pack_partials(partials)) == partials


@pytest.mark.slow
async def test_new_scheduler_takes_the_engine_over(ray_node: None) -> None:
    """The requests of the first owner end, as after the death of its process, and their ids can be used again."""
    first = RayEngine.spawn(TIMED, None)
    await first.start()
    old = asyncio.create_task(first.generate(GenerationRequest("same-id", ModelInput.of((3,)), 1000, seed=1)))
    await soon(lambda: any(first.progress({"same-id": 0}).values()))
    second = RayEngine(first.actor)
    await second.suspend("restart")
    await second.update(4, Here())  # the timed engine reads no weights
    await second.resume()
    new = await second.generate(GenerationRequest("same-id", ModelInput.of((3,)), 10, seed=2))
    assert new.versions == (4,) * 10
    with pytest.raises(EngineFailed, match="taken over this engine"):
        await asyncio.wait_for(old, HANG_SECONDS)
    with pytest.raises(EngineFailed, match="taken over this engine"):
        await first.suspend("continue")
    await first.close()  # the first client does not own the engine, so it must not close the engine
    assert (await second.stats()).running == 0
    assert (await second.generate(GenerationRequest("x", ModelInput.of((3,)), 1))).versions == (4,)
    await second.close()


@pytest.mark.slow
async def test_dead_engine_is_restarted_within_its_actor(ray_node: None) -> None:
    """The new engine has no weights, and the client of the dead engine notices. An actor that answers is not killed."""
    actor = RayEngine.spawn(TIMED, None).actor
    old = RayEngine(actor, keep_actor=True)
    await old.start()
    await old.update(4, Here())
    assert await old.owns()
    await actor.__ray_call__.remote(lambda self: setattr(self._engine, "_dead", "the timed engine was killed"))
    with pytest.raises(EngineFailed, match="killed"):
        await actor.health.remote()
    new = RayEngine(actor, keep_actor=True)
    await actor.start.remote()
    await actor.health.remote()
    assert not await old.owns()  # the old client does not know of the death
    await old.close()
    proxy = InferenceProxy([], 4, replacement_seconds=HANG_SECONDS)
    await proxy.join(0, new)
    await proxy.update(5, Here(), WeightsProbe((), (), 0.1), "continue")
    assert (await proxy.generate(GenerationRequest("x", ModelInput.of((3,)), 1))).generation.versions == (5,)
    await new.close()
    with pytest.raises(EngineFailed, match="closed"):
        await actor.health.remote()
    ray.kill(actor)


async def pid(engine: RayEngine) -> int:
    found: int = await engine.actor.__ray_call__.remote(lambda _: os.getpid())
    return found


async def serving(*silent_seconds: float) -> tuple[list[RayEngine], InferenceProxy]:
    """Create an engine for each of these limits on its silence, and a proxy for all engines."""
    actors = [RayEngine.spawn(TIMED, None).actor for _ in silent_seconds]
    engines = [
        RayEngine(actor, name=f"engine-{i}", silent_seconds=seconds)
        for i, (actor, seconds) in enumerate(zip(actors, silent_seconds, strict=True))
    ]
    for engine in engines:
        await engine.start()
    proxy = InferenceProxy(engines, 4, replacement_seconds=HANG_SECONDS)
    await proxy.update(0, Here(), WeightsProbe((), (), 0.1), "continue")
    return engines, proxy


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
async def test_requests_of_a_dead_or_stuck_actor_continue_elsewhere(ray_node: None, blow: signal.Signals) -> None:
    engines, proxy = await serving(HANG_SECONDS if blow == signal.SIGKILL else 4.0, HANG_SECONDS)
    requests = [GenerationRequest(f"r{i}", ModelInput.of((3,)), 300, seed=i) for i in range(8)]
    running = [asyncio.create_task(proxy.generate(request)) for request in requests]
    ids = dict.fromkeys((request.id for request in requests), 0)
    await soon(lambda: [len(partial) > 10 for partial in engines[0].progress(ids).values()] == [True] * 4)
    process = psutil.Process(await pid(engines[0]))
    os.kill(process.pid, blow)
    made = await asyncio.wait_for(asyncio.gather(*running), HANG_SECONDS)
    assert proxy.taken_over == 4
    assert list(proxy.failed) == [0]
    undisturbed = TimedEngine(TIMED.model_copy(update={"seconds_per_token": 0.0}))
    for request, one in zip(requests, made, strict=True):
        assert one.version == 0
        assert one.generation.tokens == (await undisturbed.generate(request)).tokens
        assert one.generation.versions == (0,) * 300
    process.wait(HANG_SECONDS)  # a stuck process is killed, too
    await engines[1].close()


@pytest.mark.slow
async def test_engine_that_generates_no_tokens_is_reported_as_failed(ray_node: None) -> None:
    hanging = TIMED.model_copy(update={"seconds_per_token": 100.0})
    engine = RayEngine(RayEngine.spawn(hanging, None).actor, name="engine-0", silent_seconds=2.0)
    await engine.start()
    await engine.suspend("continue")
    waiting = asyncio.create_task(engine.generate(GenerationRequest("a", ModelInput.of((3,)), 10)))
    await asyncio.sleep(2.5)
    assert not waiting.done()  # a suspended engine is not stuck
    await engine.resume()
    with pytest.raises(EngineFailed, match=r"engine-0 hangs: .* generated no token for 2 s"):
        await asyncio.wait_for(waiting, HANG_SECONDS)
    await engine.close()


@pytest.mark.slow
async def test_busy_time_counts_only_running_requests(ray_node: None) -> None:
    engine = RayEngine.spawn(TIMED, None)
    await engine.start()
    await asyncio.sleep(0.3)
    assert (await engine.stats()).busy_seconds == 0
    task = asyncio.create_task(engine.generate(GenerationRequest("a", ModelInput.of((3,)), 300, seed=1)))
    await soon(lambda: any(engine.progress({"a": 0}).values()))
    await engine.suspend("continue")
    suspended = await engine.stats()
    assert suspended.running == 1
    await asyncio.sleep(0.5)
    assert (await engine.stats()).busy_seconds == suspended.busy_seconds > 0
    await engine.resume()
    await task
    stats = await engine.stats()
    assert stats.running == 0
    assert stats.tokens == 300
    assert stats.busy_seconds > 2.95  # 300 tokens take at least 3 s
    assert (await engine.stats()).busy_seconds == stats.busy_seconds
    await engine.close()


@pytest.mark.slow
async def test_bad_request_fails_alone_and_restart_keeps_the_weights(ray_node: None, tmp_path: Path) -> None:
    engine = RayEngine.spawn(TransformersEngineConfig(), make_policy(tmp_path / "policy"))
    await engine.start()
    await engine.update(0, Here(make_weights(tmp_path / "0", seed=0)))
    before = await engine.logprobs(range(3, 20))
    good, bad = await asyncio.gather(
        engine.generate(GenerationRequest("good", ModelInput.of((3,)), 4)),
        engine.generate(GenerationRequest("bad", ModelInput.of(()), 4)),
        return_exceptions=True,
    )
    assert isinstance(bad, ValueError)
    assert isinstance(good, Generation)
    await engine.start()
    assert await engine.logprobs(range(3, 20)) == before
    await engine.actor.health.remote()
    await engine.close()


async def test_timed_response_depends_only_on_its_seed() -> None:
    config = TimedEngineConfig(median_tokens=16, sigma=1.0, seconds_per_token=0.0001)
    engines = [TimedEngine(config), TimedEngine(config)]
    requests = [GenerationRequest(f"r{i}", ModelInput.of((3,)), 64, seed=i) for i in range(200)]
    one = await asyncio.gather(*map(engines[0].generate, requests))
    two = await asyncio.gather(*map(engines[1].generate, reversed(requests)))
    assert one == two[::-1]
    lengths = sorted(len(generation.tokens) for generation in one)
    assert 12 <= lengths[100] <= 20
    assert {generation.ending for generation in one} == {StopReason.STOP, StopReason.LENGTH}
    assert all((g.ending is StopReason.LENGTH) <= (len(g.tokens) == 64) for g in one)


@pytest.mark.slow
async def test_new_scheduler_may_replace_the_owner_of_an_engine(ray_node: None) -> None:
    """Scheduler and engine may restart together, and the new scheduler may find the new engine by itself."""
    engines, proxy = await serving(HANG_SECONDS)
    running = asyncio.create_task(proxy.generate(GenerationRequest("a", ModelInput.of((3,)), 500, seed=1)))
    await soon(lambda: any(engines[0].progress({"a": 0}).values()))
    await proxy.join(0, RayEngine(engines[0].actor))
    made = await asyncio.wait_for(running, HANG_SECONDS)
    assert made.generation.versions == (0,) * 500
    assert proxy.taken_over == 1
    never_used = InferenceProxy([RayEngine(engines[0].actor)], 4)
    await never_used.join(0, last := RayEngine(engines[0].actor))
    await asyncio.sleep(0.1)
    await last.actor.health.remote()
    await last.close()


@pytest.mark.slow
async def test_instant_responses_end_on_the_actors_event_loop(ray_node: None) -> None:
    """On Ray's event loop, uvloop, a timer that is already due reports no due time."""
    config = TimedEngineConfig(max_concurrent_requests=8, max_new_tokens=4, seconds_per_token=0.0, update_seconds=0.0)
    engine = RayEngine.spawn(config, None)
    await engine.start()
    await engine.suspend("continue")
    await engine.update(0, Here())
    await engine.resume()
    requests = [GenerationRequest(f"r{i}", ModelInput.of((3,)), 4, seed=i) for i in range(40)]
    made = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert [one.id for one in made] == [request.id for request in requests]


class Deaf:
    """An actor that no message can be sent to."""

    def __getattr__(self, method: str) -> Deaf:
        return self

    async def remote(self, *arguments: object) -> None: ...


async def test_unsendable_request_fails_without_a_wait() -> None:
    engine = RayEngine(Deaf())
    with pytest.raises(TypeError, match="Int32s"):  # an invalid prompt is an error of its caller only
        ModelInput.of(("no token",))  # type: ignore[arg-type]
    odd = TokenSpan((1,), (-0.5,), (0,))  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="could not take a request: AttributeError"):
        await asyncio.wait_for(
            engine.generate(GenerationRequest("b", ModelInput.of((1,)), 3, prefix=odd)), HANG_SECONDS
        )
