"""Tests of the cache queue: which episodes are admitted, which keep their tokens, and what the KV caches contain."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.cache_queue import CacheLimits, CacheQueue
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.slots import EngineSlots, Ticket
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.pipeline import Pipeline


def queue_of(*capacities: int, slots: int = 8) -> tuple[CacheQueue, list[EngineSlots]]:
    lanes = [EngineSlots(TimedEngine(TimedEngineConfig()), slots) for _ in capacities]
    queue = CacheQueue(CacheLimits(capacities[0]), "least-work", 0.0)
    for place, lane in enumerate(lanes):
        lane.serves.set()
        queue.put(place, lane)
    return queue, lanes


def ticket_of(queue: CacheQueue, episode: str, tokens: int, priority: float = 0.0) -> Ticket:
    ticket = queue.create_ticket(priority)
    ticket.episode, ticket.tokens = episode, tokens
    return ticket


async def begin(
    queue: CacheQueue, episode: str, tokens: int, priority: float = 0.0
) -> asyncio.Task[EngineSlots | None]:
    task = asyncio.create_task(queue.take(ticket_of(queue, episode, tokens, priority)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def park(queue: CacheQueue, lane: EngineSlots, episode: str, tokens: int) -> None:
    """End a turn of an episode, which now has `tokens` tokens."""
    queue.release(lane, ticket_of(queue, episode, tokens))


def test_episode_waits_until_its_tokens_fit() -> None:
    async def run() -> None:
        queue, [lane] = queue_of(100)
        first, second = await begin(queue, "a", 60), await begin(queue, "b", 60)
        assert first.done()
        assert not second.done()
        park(queue, lane, "a", 60)  # the environment works, and the episode keeps its tokens
        await asyncio.sleep(0)
        assert not second.done()
        queue.end_episode("a")
        await asyncio.sleep(0)
        assert second.done()

    run_virtual(run())


def test_next_turn_of_an_episode_precedes_new_episodes() -> None:
    async def run() -> None:
        queue, lanes = queue_of(100, 100, slots=1)
        first = await begin(queue, "a", 10)
        home = await first
        assert home is not None
        [other] = [lane for lane in lanes if lane is not home]
        assert await (await begin(queue, "b", 10)) is other
        park(queue, home, "a", 10)
        assert await (await begin(queue, "c", 10, priority=-1)) is home  # `home` has a free slot
        waiting, back = await begin(queue, "d", 10, priority=-5), await begin(queue, "a", 12)
        park(queue, other, "b", 10)  # the new episode d gets the free slot
        assert await waiting is other
        assert not back.done()
        late = await begin(queue, "e", 10, priority=-9)
        park(queue, home, "c", 10)
        assert await back is home
        assert not late.done()

    run_virtual(run())


def test_idle_episode_with_fewest_tokens_is_evicted_first() -> None:
    async def run() -> None:
        queue, [lane] = queue_of(204)
        for episode, tokens in (("large", 60), ("small", 20), ("grows", 70)):
            await begin(queue, episode, tokens)
        park(queue, lane, "large", 60)
        park(queue, lane, "small", 20)
        park(queue, lane, "grows", 130)  # the next turns need 6 tokens each
        assert (queue.evicted, queue.admitted) == (1, 2)
        back = await begin(queue, "small", 20)
        assert not back.done()  # its tokens do not fit any more
        assert (await begin(queue, "large", 60)).done()
        queue.end_episode("grows")
        queue.end_episode("large")
        await asyncio.sleep(0)
        assert back.done()

    run_virtual(run())


def test_episode_larger_than_a_cache_runs_alone() -> None:
    async def run() -> None:
        queue, [lane] = queue_of(100)
        first, second = await begin(queue, "giant", 500), await begin(queue, "b", 1)
        assert first.done()
        assert not second.done()
        park(queue, lane, "giant", 900)
        queue.end_episode("giant")
        await asyncio.sleep(0)
        assert second.done()

    run_virtual(run())


def test_shrinking_episodes_are_not_expected_to_shrink_further() -> None:
    """A branch has shortened an episode by 40 tokens. Later turns are expected to add 0 tokens, and not -40."""

    async def run() -> None:
        queue, [lane] = queue_of(100)
        await begin(queue, "a", 60)
        park(queue, lane, "a", 20)
        first, second = await begin(queue, "b", 70), await begin(queue, "c", 70)
        assert first.done()
        assert not second.done()

    run_virtual(run())


@pytest.mark.parametrize("how", ["failed", "removed"])
def test_cache_reservations_end_with_their_engine(how: str) -> None:
    async def run() -> None:
        queue, lanes = queue_of(100, 100, slots=1)
        home = await (await begin(queue, "a", 10))
        assert home is not None
        park(queue, home, "a", 10)
        await begin(queue, "b", 10)
        await begin(queue, "c", 10)
        back = await begin(queue, "a", 12)
        assert not back.done()
        home.failure = EngineFailed("dead")
        if how == "removed":
            queue.remove(home)
        else:
            queue.offer_slots(home)
        [other] = [lane for lane in lanes if lane is not home]
        park(queue, other, "b", 10)
        park(queue, other, "c", 10)
        await asyncio.sleep(0)
        assert back.result() is other

    run_virtual(run())


@given(
    capacity=st.integers(20, 200),
    engines=st.integers(1, 3),
    slots=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    deaths=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_random_episodes_end_and_leave_no_cache_reservations(
    capacity: int, engines: int, slots: int, seed: int, deaths: int
) -> None:
    """Episodes play drawn turns while engines join and die. Episodes that share a cache always fit into it."""
    draw = random.Random(seed)

    async def play(queue: CacheQueue, number: int) -> None:
        tokens = draw.randint(1, 60)
        for turn in range(draw.randint(1, 5)):
            ticket = ticket_of(queue, f"e{number}", tokens, draw.choice((0, 1)))
            lane = await queue.take(ticket)
            assert lane is not None
            assert lane.taken <= slots
            await asyncio.sleep(draw.random())
            ticket.tokens = tokens = tokens + draw.randint(1, 20)
            queue.release(lane, ticket)
            use = queue.uses[lane]
            parked = any(claim.stamp == stamp for _, stamp, claim in use.parked)
            assert use.tokens <= use.capacity or not parked or use.claims == 1
            await asyncio.sleep(draw.random() * (turn % 2))
        queue.end_episode(f"e{number}")

    async def run() -> None:
        queue, lanes = queue_of(*[capacity] * engines, slots=slots)
        playing = [asyncio.create_task(play(queue, number)) for number in range(12)]
        for lane in lanes[1 : 1 + deaths]:
            await asyncio.sleep(draw.random())
            lane.failure = EngineFailed("dead")
            queue.offer_slots(lane)
        await asyncio.gather(*playing)
        assert queue.admitted == 0
        assert all((use.claims, use.tokens) == (0, 0) for use in queue.uses.values())

    run_virtual(run())


# --- engines and runs -------------------------------------------------------------------------------------------


def turn_of(episode: str, earlier: int, number: int) -> GenerationRequest:
    prompt = ModelInput.of(Int32s.of([1] * (1 + earlier)))
    return GenerationRequest(f"{episode}.{number}", prompt, 10, seed=number, episode=episode, earlier=earlier)


def engine_of(**keys: object) -> TimedEngine:
    common = {"median_tokens": 1e6, "sigma": 0, "seconds_per_token": 0.1, "prefill_seconds_per_token": 0.01}
    return TimedEngine(TimedEngineConfig.model_validate({**common, **keys}))


async def started(engine: TimedEngine) -> TimedEngine:
    await engine.start()
    await engine.suspend("continue")
    await engine.update(0, None)  # type: ignore[arg-type]
    await engine.resume()
    return engine


def test_turn_computes_only_the_tokens_that_are_not_cached() -> None:
    """The second turn adds 5 tokens to 10 cached ones: 0.05 s of prefill, and 1 s for its 10 tokens."""

    async def run() -> None:
        engine, clock = await started(engine_of(kv_tokens=100)), asyncio.get_running_loop().time
        assert (await engine.generate(turn_of("a", 0, 0))).cached == 0
        began = clock()
        assert (await engine.generate(turn_of("a", 15, 1))).cached == 10
        assert clock() - began == pytest.approx(1.05)
        began = clock()
        assert (await engine.generate(turn_of("b", 15, 2))).cached == 0
        assert clock() - began == pytest.approx(1.15)

    run_virtual(run())


def test_cache_evicts_the_episode_whose_turn_ended_first() -> None:
    async def run() -> None:
        engine = await started(engine_of(kv_tokens=45))
        for episode in "abc":
            await engine.generate(turn_of(episode, 5, ord(episode)))  # each episode keeps 15 tokens
        await engine.generate(turn_of("d", 5, 9))
        assert (await engine.generate(turn_of("c", 15, 1))).cached == 15
        assert (await engine.generate(turn_of("a", 15, 2))).cached == 0

    run_virtual(run())


def test_weight_update_empties_the_cache() -> None:
    async def run() -> None:
        engine = await started(engine_of(kv_tokens=100))
        await engine.generate(turn_of("a", 0, 0))
        await started(engine)
        assert (await engine.generate(turn_of("a", 10, 1))).cached == 0

    run_virtual(run())


class CacheProxy(InferenceProxy):
    """A proxy that admits episodes by their tokens, to caches of 60 tokens."""

    def __init__(self, engines, slots, patience=0.0, routing="least-work"):  # type: ignore[no-untyped-def]
        super().__init__(engines, slots, patience, routing, CacheLimits(60))


@pytest.mark.parametrize("deaths", [(), ((1.0, 0), (2.0, 1))])
def test_run_that_admits_by_tokens_passes_the_audit(deaths: tuple[tuple[float, int], ...]) -> None:
    section = TimedEnvironmentConfig(median_turns=3, turns_sigma=0.5, turn_tokens=8, step_seconds=0.05, step_sigma=0.05)
    choices = {"redundant_responses": 1, "on_stale": "drop"}
    pipeline = Pipeline(
        MemoryStore(f"cache {len(deaths)}"),
        engines=2,
        engine_deaths=deaths,
        environment=TimedEnvironment(section),
        proxy_type=CacheProxy,
        choices=choices,
    )
    run_virtual(pipeline.run())
    report = audit(pipeline.store)
    assert report.clean, report.violations
    assert report.versions == 6
