"""The proxy: an engine under wrong weights makes no token that is used; requests go where there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.clock import run_virtual
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe
from rollflow.tasks.settings import TimedEngineConfig

NO_PROBE = Probe((), (), 0.1)
CONFIG = TimedEngineConfig(slots=4, max_new_tokens=50, median_tokens=30, sigma=0.5, seconds_per_token=0.1)


class Probed(TimedEngine):
    """A timed engine that answers the probe, wrongly from some version on."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__(CONFIG)
        self.wrong_from = wrong_from

    async def logprobs(self, tokens):  # type: ignore[no-untyped-def]
        return (-1.0, -2.0 - (0.5 if self.version >= self.wrong_from else 0.0))


PROBE = Probe((1, 2, 3), (-1.0, -2.0), 0.01)


def request(number: int) -> GenerationRequest:
    return GenerationRequest(f"r{number}", (1, 2), 50, seed=number)


def test_a_wrong_engine_is_closed_and_its_requests_go_elsewhere() -> None:
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
        assert all(m.generation.ending in (Ending.STOP, Ending.LENGTH) for m in made)
        assert len(proxy.failures) == 1
        assert "differ from the learner's by 0.5 nats" in proxy.failures[0]
        assert proxy.version == 1

    run_virtual(main())


def test_without_a_good_engine_everything_waiting_fails_with_the_reason() -> None:
    async def main() -> None:
        engine = Probed(1)
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(request(i))) for i in range(6)]
        await asyncio.sleep(1.0)
        with pytest.raises(EngineFailed, match=r"no engine is left: .*its weights are not the published ones"):
            await proxy.update(1, Path(), PROBE, "continue")
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, EngineFailed)

    run_virtual(main())


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_running_requests_at_an_update(in_flight: str) -> None:
    """Continued ones hold tokens of both versions and count as started under the old; restarted ones only new."""

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


def test_requests_spread_over_engines_and_keep_to_their_slots() -> None:
    async def main() -> None:
        engines = [TimedEngine(CONFIG) for _ in range(3)]
        for engine in engines:
            await engine.start()
        proxy = InferenceProxy(engines, 4)
        await proxy.update(0, Path(), NO_PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(request(i))) for i in range(12)]
        await asyncio.sleep(0.01)
        assert [lane.assigned for lane in proxy._lanes] == [4, 4, 4]
        await asyncio.gather(*running)

    run_virtual(main())


def test_a_probe_that_is_not_a_number_fails() -> None:
    with pytest.raises(EngineFailed):
        PROBE.check((-1.0, float("nan")))
    PROBE.check((-1.001, -2.0))
    PROBE.check(None)
