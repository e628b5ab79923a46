"""Random tests of the proxy: engines die, join and are updated while requests run, and many calls are made at a time.

Every request ends once, with its own tokens. `test_proxy_engines` and `test_proxy_requests` test an example of each
guarantee.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, VersionedGeneration, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.counts import examples

NO_PROBE = WeightsProbe((), (), 0.1)
CONFIG = TimedEngineConfig(
    max_concurrent_requests=4, max_new_tokens=50, median_tokens=30, sigma=0.5, seconds_per_token=0.1
)


def request(number: int) -> GenerationRequest:
    return GenerationRequest(f"r{number}", ModelInput.of((1, 2)), 50, seed=number)


@dataclass
class World:
    """Three engines that die, join and are replaced while requests run; it records each request's tokens at a death."""

    in_flight: InFlight
    first: dict[int, int] = field(default_factory=dict)  # seed -> version at the first start
    had: dict[int, TokenSpan] = field(default_factory=dict)  # seed -> most tokens sampled before a death
    version: int = 0

    async def run(self, events: list[tuple[float, int, str]]) -> tuple[InferenceProxy, list[VersionedGeneration]]:
        self.engines = [await self.engine() for _ in range(3)]
        self.proxy = InferenceProxy(self.engines, 4, replacement_seconds=100.0)
        await self.proxy.update(0, Path(), NO_PROBE, self.in_flight)
        running = [asyncio.create_task(self.proxy.generate(request(number))) for number in range(20)]
        changes = [asyncio.create_task(self.change(*event)) for event in events]
        await asyncio.gather(*changes)
        await asyncio.gather(*(self.join(place) for place in self.proxy.failed))
        return self.proxy, await asyncio.gather(*running)

    async def engine(self) -> Observed:
        engine = Observed(CONFIG, self)
        await engine.start()
        return engine

    async def join(self, place: int) -> None:
        engine = await self.engine()
        await self.proxy.join(place, engine)
        assert engine.version == self.proxy._taken.version  # type: ignore[union-attr]
        self.engines[place] = engine

    async def change(self, when: float, place: int, what: str) -> None:
        await asyncio.sleep(when)
        if what == "kill":
            self.engines[place].kill()
        elif what == "join":
            await self.join(place)
        else:
            self.version += 1
            await self.proxy.update(self.version, Path(), NO_PROBE, self.in_flight)
        assert self.proxy.version >= 0


class Observed(TimedEngine):
    """A timed engine that records what it starts, and the tokens of its requests when it dies."""

    def __init__(self, config: TimedEngineConfig, world: World) -> None:
        super().__init__(config)
        self.world = world

    async def generate(self, request: GenerationRequest) -> Generation:
        seed = request.seed or 0
        if not request.prefix:
            self.world.first[seed] = self.version
        try:
            made = await super().generate(request)
        except EngineFailed:
            had = self.progress({request.id: 0}).get(request.id, TokenSpan())
            self.world.had[seed] = max(had, request.prefix, key=len)
            raise
        if made.ending is StopReason.ABORTED:
            self.world.had[seed] = made.made
        return made


EVENT = st.tuples(st.floats(0, 12), st.integers(0, 2), st.sampled_from(["kill", "join", "update"]))


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENT, max_size=12), st.sampled_from(["continue", "restart"]))
@example([(1.0, 0, "kill"), (1.0, 1, "kill"), (1.0, 2, "kill"), (2.0, 0, "update"), (3.0, 1, "join")], "continue")
@example([(1.0, 0, "join"), (1.0, 1, "join"), (1.0, 2, "join"), (1.5, 0, "update")], "continue")
@example([(1.0, 0, "join"), (1.0, 0, "update"), (1.02, 0, "kill")], "restart")
def test_every_engine_request_ends_once_with_all_its_tokens(
    events: list[tuple[float, int, str]], in_flight: InFlight
) -> None:
    world = World(in_flight)
    proxy, made = run_virtual(world.run(events))
    undisturbed = run_virtual(World(in_flight).run([]))[1]
    assert proxy.running == 0
    for seed, (one, other) in enumerate(zip(made, undisturbed, strict=True)):
        assert one.generation.tokens == other.generation.tokens  # set by the seed: none lost or repeated
        assert one.generation.ending == other.generation.ending
        versions = one.generation.versions
        assert len(versions) == len(one.generation.logprobs) == len(one.generation.tokens)
        assert list(versions) == sorted(versions)
        assert one.version == world.first.get(seed, 0)
        if in_flight == "restart":
            assert set(versions) == {one.version}
        elif seed in world.had:
            assert versions[: len(world.had[seed])] == world.had[seed].versions


# --- a crowd of calls -----------------------------------------------------------------------------------------

SLOTS = 3
TIMED = TimedEngineConfig(
    max_concurrent_requests=SLOTS, median_tokens=4, max_new_tokens=12, seconds_per_token=0.1, update_seconds=0.1
)


class Strict(TimedEngine):
    """A timed engine that rejects more requests than slots; its calls take effect a moment later."""

    now = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.now += 1
        assert self.now <= SLOTS, "more requests than slots"
        try:
            return await super().generate(request)
        finally:
            self.now -= 1

    async def abort(self, ids: Any) -> None:
        await asyncio.sleep(0.05)
        await super().abort(ids)


@dataclass
class Crowd:
    """Makes random calls to the proxy. A request's number is its seed, so its response is known."""

    routing: Routing
    in_flight: InFlight
    tasks: dict[int, asyncio.Task[StopReason]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)

    async def run(self, events: list[tuple[float, str, int, int]]) -> None:
        self.proxy = InferenceProxy([Strict(TIMED), Strict(TIMED)], SLOTS, 1e6, self.routing)
        await self.proxy.update(0, Path(), NO_PROBE, self.in_flight)
        changes = [asyncio.create_task(self.change(*event)) for event in events]
        await asyncio.gather(*changes)
        for place in self.proxy.failed:
            await self.proxy.join(place, Strict(TIMED))
        async with asyncio.timeout(100):
            outcomes = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for number, outcome in zip(self.tasks, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                assert number in self.cancelled
            else:
                assert outcome in (StopReason.STOP, StopReason.LENGTH) or number in self.aborted, outcome
        assert self.proxy.running == 0
        assert all(lane.taken == 0 for lane in self.proxy._queue.places.values())

    async def change(self, at: float, what: str, number: int, many: int) -> None:
        await asyncio.sleep(at)
        match what:
            case "ask":
                for _ in range(many):
                    self.ask(self.one(str(len(self.tasks)), number))
            case "abort":
                await self.abort(number, many)
            case "cancel":
                self.cancelled |= {key for key in self.some(number, many) if self.tasks[key].cancel()}
            case "kill":
                self.proxy._queue.places[number % 2].engine.kill()  # type: ignore[attr-defined]
            case "join":
                await self.proxy.join(number % 2, Strict(TIMED))
            case _:
                version = max(self.proxy.version, self.proxy._taken.version if self.proxy._taken else 0) + 1
                await self.proxy.update(version, Path(), NO_PROBE, self.in_flight)
        for _ in range(4):  # a cancelled task needs some iterations of the event loop
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Check that no request waits while there is room."""
        queue = self.proxy._queue
        if any(ticket.waits for _, ticket in queue._queue):
            assert not any(lane.free for lane in queue.live)
        assert queue.alive == len(queue.live)

    def some(self, number: int, width: int) -> list[int]:
        running = [key for key, task in self.tasks.items() if not task.done()]
        return running[number : number + width]

    async def abort(self, number: int, width: int) -> None:
        """Abort requests, and check that they end immediately, unless an engine is being updated."""
        chosen = self.some(number, width)
        self.aborted |= set(chosen)
        alone = [key for key in chosen if f"r{key}" in self.proxy._jobs]
        await self.proxy.abort([f"r{key}" for key in chosen])
        await asyncio.sleep(2 * TIMED.update_seconds + 0.1)
        assert all(self.tasks[key].done() for key in alone), "an aborted request goes on"

    def ask(self, coroutine: Coroutine[Any, Any, StopReason]) -> None:
        self.tasks[len(self.tasks)] = asyncio.create_task(coroutine)

    async def one(self, name: str, priority: int) -> StopReason:
        request = GenerationRequest(f"r{name}", ModelInput.of((1,)), 12, seed=priority)
        asked = RequestOptions(priority, priority)
        return StopReason((await self.proxy.generate(request, asked)).generation.ending)


EVENTS = st.tuples(
    st.integers(0, 40).map(lambda twentieths: twentieths / 20),
    st.sampled_from(["ask", "abort", "cancel", "kill", "join", "update"]),
    st.integers(0, 5),
    st.integers(1, SLOTS),
)


@pytest.mark.many
@settings(max_examples=examples(600), deadline=None, phases=set(Phase) - {Phase.explain})
@given(
    st.lists(EVENTS, max_size=16),
    st.sampled_from(["least-work", "prefix"]),
    st.sampled_from(["continue", "restart"]),
)
def test_every_proxy_request_ends_despite_failures(
    events: list[tuple[float, str, int, int]], routing: Routing, in_flight: InFlight
) -> None:
    run_virtual(Crowd(routing, in_flight).run([(0.0, "ask", 1, 3), (0.0, "ask", 0, 2), *events]))
