"""The proxy's requests, in examples worked by hand: their callbacks and results, whichever engine they move to."""

from __future__ import annotations

import asyncio

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, VersionedGeneration
from tests.support.noting import NO_PROBE, WEIGHTS, Noting, asking, request, virtual


def test_abort_is_sent_only_to_the_engine_of_the_request() -> None:
    async def main() -> None:
        engines = [Noting(), Noting()]
        proxy = InferenceProxy(engines, 1)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        tasks = [asking(proxy, name) for name in "abc"]
        await asyncio.sleep(1.05)
        for engine in engines:
            engine.calls.clear()
        await proxy.abort(["a", "c", "nobody"])
        first, waiting = await tasks[0], await tasks[2]
        assert sorted(engine.calls for engine in engines) == [[], [("abort", "a")]]
        assert (first.generation.ending, len(first.generation.tokens), first.version) == (StopReason.ABORTED, 10, 0)
        assert (waiting.generation.id, waiting.generation.ending) == ("c", StopReason.ABORTED)
        assert (len(waiting.generation.tokens), waiting.version) == (0, 0)
        assert (await tasks[1]).generation.ending is StopReason.LENGTH
        assert proxy.running == 0

    virtual(main)


def test_engine_that_cannot_abort_is_removed() -> None:
    async def main() -> None:
        bad, good = Noting(), Noting()
        proxy = InferenceProxy([bad, good], 1)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        tasks = [asking(proxy, name) for name in "ab"]
        await asyncio.sleep(1.0)
        bad.fails.add("abort")
        await proxy.abort(["a", "b"])
        assert proxy.failed == {0: "no abort"}
        made = await asyncio.gather(*tasks)
        assert [one.generation.ending for one in made] == [StopReason.ABORTED] * 2
        assert [len(one.generation.tokens) for one in made] == [10, 10]
        assert (proxy.taken_over, proxy.restarted) == (0, 0)
        await asyncio.sleep(0)
        assert bad.closed == 1

    virtual(main)


def test_abort_while_a_request_changes_engine_keeps_its_tokens() -> None:
    async def main() -> None:
        engine, clock = Noting(), asyncio.get_running_loop().time
        proxy = InferenceProxy([engine], 4, replacement_seconds=100.0)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        task = asking(proxy, "a")
        await asyncio.sleep(1.05)
        engine.kill()
        await asyncio.sleep(1.0)
        await proxy.abort(["a"])
        made = await task
        assert (made.generation.ending, len(made.generation.tokens), made.version) == (StopReason.ABORTED, 10, 0)
        assert clock() == pytest.approx(0.5 + 2.05)  # the request does not wait for an engine

    virtual(main)


async def granted(proxy: InferenceProxy, starts: list[int]) -> asyncio.Task[VersionedGeneration]:
    """Start a request that has just been granted the only slot, before its task runs."""
    await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
    [lane] = proxy._queue.live
    holding = proxy._queue.create_ticket(0)
    await proxy._queue.take(holding)
    task = asking(proxy, "a", RequestOptions(on_start=lambda _, version: starts.append(version)))
    await asyncio.sleep(0)
    proxy._queue.release(lane, holding)
    return task


def test_request_aborted_during_an_update_never_starts() -> None:
    async def main() -> None:
        proxy, starts = InferenceProxy([Noting()], 1), list[int]()
        task = await granted(proxy, starts)
        [lane] = proxy._queue.live
        lane.serves.clear()  # an update begins
        await asyncio.sleep(0)
        await proxy.abort(["a"])
        lane.serves.set()
        made = (await task).generation
        assert (made.id, made.ending, len(made.tokens)) == ("a", StopReason.ABORTED, 0)
        assert (starts, lane.taken, proxy.running) == ([], 0, 0)

    virtual(main)


def test_on_start_callback_is_called_at_each_start_of_a_request() -> None:
    async def main() -> None:
        proxy, starts = InferenceProxy([Noting()], 4), list[int]()
        task = asking(proxy, "a", RequestOptions(on_start=lambda _, version: starts.append(version)))
        await asyncio.sleep(1.0)
        assert (starts, proxy.version) == ([], -1)  # no request starts, because there are no weights
        await proxy.update(0, WEIGHTS, NO_PROBE, "restart")
        await asyncio.sleep(1.0)
        assert starts == [0]
        await proxy.update(1, WEIGHTS, NO_PROBE, "restart")
        made = await task
        assert (starts, made.version, made.generation.id) == ([0, 1], 1, "a'")
        assert set(made.generation.versions) == {1}
        assert (proxy.restarted, proxy.taken_over) == (1, 0)

    virtual(main)


def test_engine_that_fails_when_chosen_gets_no_request() -> None:
    async def main() -> None:
        proxy, starts = InferenceProxy([Noting()], 1, replacement_seconds=100.0), list[int]()
        task = await granted(proxy, starts)
        [lane] = proxy._queue.live
        proxy._fail(lane, EngineFailed("lost"))
        assert len(proxy._closing) == 1
        await asyncio.sleep(1.0)
        assert (starts, proxy.restarted, lane.taken, len(proxy._closing)) == ([], 0, 0, 0)
        await proxy.join(0, Noting())
        assert (await task).version == 0
        assert starts == [0]

    virtual(main)


def test_proxy_runs_the_lowest_priority_number_first() -> None:
    async def main() -> None:
        proxy, order = InferenceProxy([Noting()], 1), list[float]()
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")

        async def one(priority: float) -> None:
            await proxy.generate(request(str(priority)), RequestOptions(priority, group=-priority))
            order.append(priority)

        await asyncio.gather(*map(one, (0, 3, 1, 2)))
        assert order == [0, 1, 2, 3]

    virtual(main)


@pytest.mark.parametrize("newer", [False, True])
def test_moved_request_keeps_its_tokens_only_at_equal_version(newer: bool) -> None:
    async def main() -> None:
        engine, starts = Noting(), list[int]()
        proxy = InferenceProxy([engine], 4, replacement_seconds=100.0)
        await proxy.update(0, WEIGHTS, NO_PROBE, "restart")
        task = asking(proxy, "a", RequestOptions(on_start=lambda _, version: starts.append(version)))
        await asyncio.sleep(1.05)
        engine.kill()
        await asyncio.sleep(1.0)
        if newer:
            await proxy.update(1, WEIGHTS, NO_PROBE, "restart")
        await proxy.join(0, Noting())
        made = await task
        assert (set(made.generation.versions), made.version) == ({int(newer)}, int(newer))
        assert (len(made.generation.tokens), starts) == (40, [0, 1] if newer else [0])
        assert (proxy.taken_over, proxy.restarted) == (1, int(newer))

    virtual(main)


def test_engine_speed_counts_only_its_own_tokens() -> None:
    async def main() -> None:
        first, second = Noting(), Noting()
        proxy = InferenceProxy([first], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        task = asking(proxy, "a")
        await asyncio.sleep(1.05)
        await proxy.join(0, second)
        await task
        [lane] = proxy._queue.live
        assert lane.tokens == 25  # the first engine made 10, and 5 more while the second loaded weights
        assert lane.seconds == pytest.approx(2.5)

    virtual(main)


class Refusing(Noting):
    """An engine that dies at its first request."""

    async def generate(self, request: GenerationRequest) -> Generation:
        raise EngineFailed("refused")


def test_engine_death_before_a_handover_loses_no_tokens() -> None:
    async def main() -> None:
        first, last = Noting(), Noting()
        proxy = InferenceProxy([first], 4, replacement_seconds=100.0)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        task = asking(proxy, "a")
        await asyncio.sleep(1.05)
        first.kill()
        await proxy.join(0, Refusing())
        await proxy.join(0, last)
        assert len((await task).generation.tokens) == 40
        assert last.usage.tokens == 30
        assert (proxy.taken_over, proxy.restarted) == (2, 0)

    virtual(main)


def test_failure_of_the_only_engine_fails_the_request() -> None:
    async def main() -> None:
        proxy = InferenceProxy([Refusing()], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        with pytest.raises(EngineFailed, match="no engine is left that can run requests: refused"):
            await proxy.generate(request("a"))
        assert (proxy.running, proxy.restarted) == (0, 1)

    virtual(main)


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_weight_update_continues_or_restarts_running_requests(in_flight: InFlight) -> None:
    """Continued requests have tokens of both versions, and count as started under the old version. Restarted requests
    have only tokens of the new version.
    """

    async def main() -> None:
        proxy = InferenceProxy([Noting()], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        running = [asking(proxy, name) for name in "abcd"]
        await asyncio.sleep(0.55)
        await proxy.update(1, WEIGHTS, NO_PROBE, in_flight)
        made = await asyncio.gather(*running)
        versions = {v for m in made for v in m.generation.versions}
        assert {m.version for m in made} == ({0} if in_flight == "continue" else {1})
        assert versions == ({0, 1} if in_flight == "continue" else {1})
        assert proxy.restarted == (0 if in_flight == "continue" else 4)

    virtual(main)
