"""The proxy's engines, in examples worked by hand: they are probed, updated, borrowed and replaced, or die."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.noting import NO_PROBE, WEIGHTS, Noting, asking, virtual

TIMED = TimedEngineConfig(
    max_concurrent_requests=4, max_new_tokens=50, median_tokens=30, sigma=0.5, seconds_per_token=0.1
)
PROBE = WeightsProbe((1, 2, 3), (-1.0, -2.0), 0.01)


class Probed(TimedEngine):
    """A timed engine that returns log-probs of the probe tokens, which are wrong from version `wrong_from` on."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__(TIMED)
        self.wrong_from = wrong_from

    async def logprobs(self, tokens):  # type: ignore[no-untyped-def]
        return (-1.0, -2.0 - (0.5 if self.version >= self.wrong_from else 0.0))


def numbered(number: int) -> GenerationRequest:
    return GenerationRequest(f"r{number}", ModelInput.of((1, 2)), 50, seed=number)


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        (None, None),
        ([-1.0, -2.0], None),
        ([-1.25, -1.75], None),  # exactly at the tolerance
        ([-1.0, -2.5], "0.5"),
        ([-1.375, -2.5], "0.5"),
        ([float("nan"), -9.0], "nan"),
        ([-9.0, float("nan")], "nan"),
    ],
)
def test_log_prob_probe_reports_the_largest_difference(found: list[float] | None, worst: str | None) -> None:
    probe = WeightsProbe((1, 2, 3), (-1.0, -2.0), 0.25)
    if worst is None:
        probe.check(found)
        return
    with pytest.raises(EngineFailed, match=rf"by {worst} nats \(allowed: 0.25 nats\)"):
        probe.check(found)


def test_log_prob_probe_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        WeightsProbe((1, 2, 3), (-1.0, -2.0), 0.25).check([-1.0])
    WeightsProbe((), (), 0.25).check([-1.0])


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_weight_update_calls_engine_methods_in_order(in_flight: InFlight) -> None:
    async def main() -> None:
        probed = Noting([-1.0])
        proxy, clock = InferenceProxy([probed], 4), asyncio.get_running_loop().time
        changes: list[int] = []
        proxy.on_change = lambda: changes.append(proxy.version)
        await proxy.update(3, WEIGHTS, WeightsProbe((7, 8), (-1.0,), 0.1), in_flight)
        assert probed.calls == [
            ("fetch", 3, WEIGHTS),
            ("suspend", in_flight),
            ("update", 3, WEIGHTS),
            ("logprobs", 7, 8),
            ("resume",),
        ]
        assert changes == [3]
        assert proxy.update_seconds == clock() == 0.5
        probed.calls.clear()
        await proxy.update(4, WEIGHTS, NO_PROBE, in_flight)
        assert ("logprobs",) not in probed.calls  # no log-probs are expected, so the engine is not asked
        assert proxy.update_seconds == 1.0

    virtual(main)


@pytest.mark.parametrize("fails", ["fetch", "suspend", "update", "logprobs", "resume"])
def test_engine_that_fails_a_weight_update_is_closed(fails: str) -> None:
    async def main() -> None:
        bad, good = Noting([-1.0]), Noting([-1.0])
        proxy = InferenceProxy([bad, good], 1)
        probe = WeightsProbe((1, 2), (-1.0,), 0.1)
        await proxy.update(0, WEIGHTS, probe, "continue")
        running = [asking(proxy, "a"), asking(proxy, "b")]
        await asyncio.sleep(1.0)
        bad.fails.add(fails)
        await proxy.update(1, WEIGHTS, probe, "continue")
        assert proxy.failed == {0: f"no {fails}"}
        assert (list(proxy.engines), proxy.capacity, proxy.version) == ([1], 1, 1)
        made = await asyncio.gather(*running)
        assert [len(one.generation.tokens) for one in made] == [40, 40]
        assert [one.version for one in made] == [0, 0]
        assert (proxy.taken_over, proxy.restarted, bad.closed, good.closed) == (1, 0, 1, 0)
        assert not proxy._closing

    virtual(main)


def test_weight_update_raises_when_the_last_engine_fails() -> None:
    async def main() -> None:
        alone = Noting()
        alone.fails.add("update")
        proxy = InferenceProxy([alone], 4)
        with pytest.raises(EngineFailed, match=r"^no engine is left that can run requests: no update$"):
            await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        waits = InferenceProxy([Noting()], 4, replacement_seconds=5.0)
        waits._queue.live[0].engine.fails.add("update")  # type: ignore[attr-defined]
        await waits.update(0, WEIGHTS, NO_PROBE, "continue")  # no error, because another engine may join
        assert waits.version == 0
        joins = Noting()
        await waits.join(0, joins)
        assert [call[:2] for call in joins.calls if call[0] in ("fetch", "update")] == [("fetch", 0), ("update", 0)]

    virtual(main)


def test_first_requests_fail_if_no_engine_loads_weights() -> None:
    async def main() -> None:
        alone, clock = Noting(), asyncio.get_running_loop().time
        alone.fails.add("fetch")
        proxy = InferenceProxy([alone], 4, replacement_seconds=5.0)
        task = asking(proxy, "a")
        await asyncio.sleep(1.0)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        with pytest.raises(EngineFailed, match=r"^no engine is left that can run requests: no fetch$"):
            await task
        assert clock() == 6.0

    virtual(main)


def test_version_is_not_served_before_an_engine_has_loaded_it() -> None:
    async def main() -> None:
        bad, good = Noting(), Noting()
        proxy = InferenceProxy([bad, good], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        bad.fails.add("update")
        updating = asyncio.create_task(proxy.update(1, WEIGHTS, NO_PROBE, "continue"))
        await asyncio.sleep(0.4)
        assert list(proxy.failed) == [0]
        assert (proxy.version, good.version) == (0, 0)
        await updating
        assert (proxy.version, good.version) == (1, 1)

    virtual(main)


def test_evaluation_borrows_the_engine_with_the_least_work() -> None:
    async def main() -> None:
        engines = [Noting(), Noting(), Noting()]
        proxy = InferenceProxy(engines, 2)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        tasks = [asking(proxy, name) for name in "abcde"]
        await asyncio.sleep(1.0)
        [idlest] = [place for place, lane in proxy._queue.places.items() if lane.taken == 1]
        async with proxy.borrow_engine() as engine:
            assert engine is engines[idlest]
            assert (sorted({0, 1, 2} - set(proxy.engines)), proxy.capacity, proxy.failed) == ([idlest], 4, {})
            await proxy.update(1, WEIGHTS, NO_PROBE, "continue")
            assert engines[idlest].version == 0
        assert sorted(proxy.engines) == [0, 1, 2]
        assert engines[idlest].version == 1
        made = await asyncio.gather(*tasks)
        assert [len(one.generation.tokens) for one in made] == [40] * 5
        assert proxy.taken_over == 1
        assert [engine.closed for engine in engines] == [0, 0, 0]

    virtual(main)


async def killed(proxy: InferenceProxy) -> None:
    async with proxy.borrow_engine() as engine:
        assert isinstance(engine, Noting)
        engine.kill()


def test_engine_that_died_while_borrowed_is_reported() -> None:
    async def main() -> None:
        engines = [Noting(), Noting()]
        proxy = InferenceProxy(engines, 2)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        with pytest.raises(EngineFailed, match="the timed engine was killed"):
            await killed(proxy)
        assert list(proxy.failed.values()) == ["the timed engine was killed"]
        with pytest.raises(EngineFailed, match="fewer than two engines are alive"):
            async with proxy.borrow_engine():
                pass

    virtual(main)


def test_engine_replaced_while_borrowed_does_not_return() -> None:
    async def main() -> None:
        engines, other = [Noting(), Noting()], Noting()
        proxy = InferenceProxy(engines, 2)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        async with proxy.borrow_engine() as engine:
            await proxy.join(0, other)
        assert engine is engines[0]
        assert proxy.engines == {0: other, 1: engines[1]}
        assert other.closed == 0

    virtual(main)


def test_death_of_a_borrowed_engine_is_raised_after_replacement() -> None:
    async def main() -> None:
        proxy = InferenceProxy([Noting(), Noting()], 2)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        lending = proxy.borrow_engine()
        engine = await lending.__aenter__()
        await proxy.join(0, Noting())
        engine.kill()  # type: ignore[attr-defined]
        with pytest.raises(EngineFailed, match="the timed engine was killed"):
            await lending.__aexit__(None, None, None)
        assert proxy.failed == {}

    virtual(main)


def test_engine_that_joins_before_version_0_waits_for_weights() -> None:
    async def main() -> None:
        joins = Noting()
        proxy = InferenceProxy([], 4)
        await proxy.join(0, joins)
        assert (proxy.engines, joins.calls) == ({0: joins}, [])
        task = asking(proxy, "a")
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        assert (await task).version == 0

    virtual(main)


def test_requests_of_a_replaced_engine_move_to_another() -> None:
    async def main() -> None:
        old, new, other = Noting(), Noting(), Noting()
        proxy = InferenceProxy([old, other], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        changes: list[int] = []
        task, elsewhere = asking(proxy, "a"), asking(proxy, "b")
        await asyncio.sleep(1.0)
        proxy.on_change = lambda: changes.append(proxy.version)
        await proxy.join(0, new)
        assert changes
        made = await task
        assert (proxy.taken_over, old.closed, len(made.generation.tokens), made.version) == (1, 1, 40, 0)
        assert [call for call in old.calls if call[0] == "abort"] == [("abort", "a")]
        assert (await elsewhere).generation.id == "b"

    virtual(main)


def test_engine_with_wrong_weights_is_closed_and_requests_move() -> None:
    async def main() -> None:
        good, bad = Probed(99), Probed(1)
        for engine in (good, bad):
            await engine.start()
        proxy = InferenceProxy([good, bad], 4)
        await proxy.update(0, Path(), PROBE, "continue")
        running = [asyncio.create_task(proxy.generate(numbered(i))) for i in range(8)]
        await asyncio.sleep(1.0)
        await proxy.update(1, Path(), PROBE, "continue")
        made = await asyncio.gather(*running)
        assert all(m.generation.ending in (StopReason.STOP, StopReason.LENGTH) for m in made)
        assert list(proxy.failed) == [1]
        assert "differ from the learner's log-probs by 0.5 nats" in proxy.failed[1]
        assert proxy.version == 1

    run_virtual(main())


class Slow(TimedEngine):
    """A timed engine that loads new weights slowly."""

    def __init__(self, seconds: float) -> None:
        super().__init__(TIMED)
        self.seconds = seconds

    async def update(self, version: int, weights: Path) -> None:
        await asyncio.sleep(self.seconds)
        await super().update(version, weights)


def test_version_is_served_once_the_first_engine_has_loaded_it() -> None:
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
        assert {(await proxy.generate(numbered(i))).version for i in range(4)} == {1}
        assert engines[1].version == 0
        assert clock() < began + 100.0
        await updating
        assert [engine.version for engine in engines] == [1, 1]

    run_virtual(main())


def test_capacity_counts_only_live_engines() -> None:
    async def main() -> None:
        engines = [TimedEngine(TIMED) for _ in range(3)]
        for engine in engines:
            await engine.start()
        proxy = InferenceProxy(engines, 4, 1e6)
        await proxy.update(0, Path(), NO_PROBE, "continue")
        assert proxy.capacity == 12
        told: list[int] = []
        proxy.on_change = lambda: told.append(proxy.capacity)
        # Without engines the capacity is that of one, so that requests still arrive and fail.
        for engine, left in zip(engines, (8, 4, 4), strict=True):
            running = [asyncio.create_task(proxy.generate(numbered(100 * left + i))) for i in range(12)]
            await asyncio.sleep(0.1)
            engine.kill("killed by the test")
            await asyncio.sleep(0.1)
            assert proxy.capacity == left
            for one in running:
                one.cancel()
        await proxy.join(0, TimedEngine(TIMED))
        assert told[-1] == 4  # the new engine has joined

    run_virtual(main())


def test_engine_with_wrong_weights_does_not_join() -> None:
    async def main() -> None:
        proxy = InferenceProxy([Probed(99)], 4)
        await proxy.update(0, Path(), PROBE, "continue")
        running = asyncio.create_task(proxy.generate(numbered(0)))
        await asyncio.sleep(1.0)
        with pytest.raises(EngineFailed, match="not the published weights"):
            await proxy.join(0, Probed(0))
        assert proxy.failed == {}
        assert (await running).version == 0

    run_virtual(main())
