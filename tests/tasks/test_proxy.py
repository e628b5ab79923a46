"""The proxy: no token from wrong weights is used, requests go where there is room, and they survive the death of their
engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, VersionedGeneration, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual

NO_PROBE = WeightsProbe((), (), 0.1)
CONFIG = TimedEngineConfig(
    max_concurrent_requests=4, max_new_tokens=50, median_tokens=30, sigma=0.5, seconds_per_token=0.1
)


class Probed(TimedEngine):
    """A timed engine that answers the probe, with wrong values from some version on."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__(CONFIG)
        self.wrong_from = wrong_from

    async def logprobs(self, tokens):  # type: ignore[no-untyped-def]
        return (-1.0, -2.0 - (0.5 if self.version >= self.wrong_from else 0.0))


PROBE = WeightsProbe((1, 2, 3), (-1.0, -2.0), 0.01)


def request(number: int) -> GenerationRequest:
    return GenerationRequest(f"r{number}", ModelInput.of((1, 2)), 50, seed=number)


def test_wrong_engine_is_closed_and_its_requests_move() -> None:
    async def main() -> None:
        good, bad = Probed(99), Probed(1)
        for engine in (good, bad):
            await engine.start()
        proxy = InferenceProxy([good, bad], 4)
        await proxy.update(0, Path(), PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(request(i))) for i in range(8)]
        await asyncio.sleep(1.0)
        await proxy.update(1, Path(), PROBE, "continue")
        made = await asyncio.gather(*running)
        assert all(m.generation.ending in (StopReason.STOP, StopReason.LENGTH) for m in made)
        assert list(proxy.failed) == [1]
        assert "differ from the learner's log-probs by 0.5 nats" in proxy.failed[1]
        assert proxy.version == 1

    run_virtual(main())


def test_waiting_requests_fail_without_a_good_engine() -> None:
    async def main() -> None:
        engine = Probed(1)
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(request(i))) for i in range(6)]
        await asyncio.sleep(1.0)
        with pytest.raises(
            EngineFailed,
            match=r"no engine is left to run requests: .*the engine's weights are not the published weights",
        ):
            await proxy.update(1, Path(), PROBE, "continue")
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, EngineFailed)

    run_virtual(main())


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_update_continues_or_restarts_running_requests(in_flight: str) -> None:
    """Continued requests have tokens of both versions and count from the old one; restarted ones have only new
    tokens.
    """

    async def main() -> None:
        engine = TimedEngine(CONFIG)
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), NO_PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(request(i))) for i in range(4)]
        await asyncio.sleep(0.55)
        await proxy.update(1, Path(), NO_PROBE, in_flight)  # type: ignore[arg-type]
        made = await asyncio.gather(*running)
        versions = {v for m in made for v in m.generation.versions}
        assert {m.version for m in made} == ({0} if in_flight == "continue" else {1})
        assert versions == ({0, 1} if in_flight == "continue" else {1})
        assert proxy.restarted == (0 if in_flight == "continue" else 4)

    run_virtual(main())


class Slow(TimedEngine):
    """A timed engine that loads new weights slowly."""

    def __init__(self, seconds: float) -> None:
        super().__init__(CONFIG)
        self.seconds = seconds

    async def update(self, version: int, weights: Path) -> None:
        await asyncio.sleep(self.seconds)
        await super().update(version, weights)


def test_version_counts_once_the_first_engine_serves_it() -> None:
    """The slowest engine does not delay admission: it takes no request before it has the version."""

    async def main() -> None:
        engines = [Slow(1.0), Slow(100.0)]
        for engine in engines:
            await engine.start()
        proxy = InferenceProxy(engines, 4)
        seen: list[tuple[float, int]] = []
        clock = asyncio.get_running_loop().time
        proxy.on_change = lambda: seen.append((clock(), proxy.version))
        await proxy.update(0, Path(), NO_PROBE, "continue")
        began = clock()
        updating = asyncio.create_task(proxy.update(1, Path(), NO_PROBE, "continue"))
        await asyncio.sleep(2.0)
        assert proxy.version == 1
        assert any(at < began + 2.0 and version == 1 for at, version in seen)
        assert {(await proxy.generate(request(i))).version for i in range(4)} == {1}
        assert engines[1].version == 0
        assert clock() < began + 100.0
        await updating
        assert [engine.version for engine in engines] == [1, 1]

    run_virtual(main())


def test_capacity_counts_only_live_engines() -> None:
    async def main() -> None:
        engines = [TimedEngine(CONFIG) for _ in range(3)]
        for engine in engines:
            await engine.start()
        proxy = InferenceProxy(engines, 4, 1e6)
        await proxy.update(0, Path(), NO_PROBE, "continue")
        assert proxy.capacity == 12
        told: list[int] = []
        proxy.on_change = lambda: told.append(proxy.capacity)
        # Without engines the capacity is that of one, so that requests still arrive and fail.
        for engine, left in zip(engines, (8, 4, 4), strict=True):
            running = [asyncio.create_task(proxy.generate(request(100 * left + i))) for i in range(12)]
            await asyncio.sleep(0.1)
            engine.kill("killed by the test")
            await asyncio.sleep(0.1)
            assert proxy.capacity == left
            for one in running:
                one.cancel()
        await proxy.join(0, TimedEngine(CONFIG))
        assert told[-1] == 4  # the new engine has joined

    run_virtual(main())


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
def test_every_request_ends_once_and_keeps_its_tokens(
    events: list[tuple[float, int, str]], in_flight: InFlight
) -> None:
    world = World(in_flight)
    proxy, made = run_virtual(world.run(events))
    undisturbed = run_virtual(World(in_flight).run([]))[1]
    assert proxy.running == 0
    for seed, (one, other) in enumerate(zip(made, undisturbed, strict=True)):
        assert one.generation.tokens == other.generation.tokens  # determined by the seed: none lost, none twice
        assert one.generation.ending == other.generation.ending
        versions = one.generation.versions
        assert len(versions) == len(one.generation.logprobs) == len(one.generation.tokens)
        assert list(versions) == sorted(versions)
        assert one.version == world.first.get(seed, 0)
        if in_flight == "restart":
            assert set(versions) == {one.version}
        elif seed in world.had:
            assert versions[: len(world.had[seed])] == world.had[seed].versions


def test_requests_wait_for_an_engine_to_join() -> None:
    async def main() -> None:
        first, second = TimedEngine(CONFIG), TimedEngine(CONFIG)
        proxy = InferenceProxy([first], 4, replacement_seconds=10.0)
        await proxy.update(0, Path(), NO_PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(request(number))) for number in range(6)]
        await asyncio.sleep(1.0)
        first.kill()
        assert proxy.failed == {0: "the timed engine was killed"}
        await proxy.update(1, Path(), NO_PROBE, "continue")
        assert proxy.version == 1
        await proxy.join(0, second)
        made = await asyncio.gather(*running)
        assert proxy.taken_over == 4
        assert [m.version for m in made] == [0, 0, 0, 0, 1, 1]
        assert all(m.generation.versions.count(0) == 10 for m in made[:4])  # a second at 0.1 s a token
        assert proxy.failed == {}

        second.kill()
        with pytest.raises(EngineFailed, match="no engine is left to run requests: the timed engine was killed"):
            await proxy.generate(request(7))
        assert asyncio.get_running_loop().time() > 10.0

    run_virtual(main())


def test_engine_with_wrong_weights_does_not_join() -> None:
    async def main() -> None:
        proxy = InferenceProxy([Probed(99)], 4)
        await proxy.update(0, Path(), PROBE, "continue")
        running = asyncio.create_task(proxy.generate(request(0)))
        await asyncio.sleep(1.0)
        with pytest.raises(EngineFailed, match="not the published weights"):
            await proxy.join(0, Probed(0))
        assert proxy.failed == {}
        assert (await running).version == 0

    run_virtual(main())
