"""The proxy by hand: what is asked of each engine, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.clock import run_virtual
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe, RequestOptions, Started

CONFIG = TimedEngineConfig(slots=4, max_new_tokens=40, median_tokens=400, seconds_per_token=0.1, update_seconds=0.5)
NO_PROBE = Probe((), (), 0.1)
WEIGHTS = Path("weights")


class Noting(TimedEngine):
    """Notes what is asked of it; answers the probe as it is told."""

    def __init__(self, said: Sequence[float] | None = None) -> None:
        super().__init__(CONFIG)
        self.said, self.calls, self.closed = said, list[tuple[Any, ...]](), 0
        self.fails: set[str] = set()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.fails:
            raise EngineFailed(f"no {call[0]}")

    async def abort(self, ids: Sequence[str]) -> None:
        self._note("abort", *ids)
        await super().abort(ids)

    async def fetch(self, version: int, weights: Any) -> None:
        self._note("fetch", version, weights)

    async def suspend(self, in_flight: InFlight) -> None:
        self._note("suspend", in_flight)
        await super().suspend(in_flight)

    async def update(self, version: int, weights: Any) -> None:
        self._note("update", version, weights)
        await super().update(version, weights)

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        self._note("logprobs", *tokens)
        return None if self.said is None else tuple(self.said)

    async def resume(self) -> None:
        self._note("resume")
        await super().resume()

    async def close(self) -> None:
        self.closed += 1
        await super().close()


def request(name: str, seed: int = 1) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), 40, seed=seed)


def asking(proxy: InferenceProxy, name: str, asked: RequestOptions | None = None) -> asyncio.Task[Started]:
    return asyncio.create_task(proxy.generate(request(name), asked))


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(1000):
            await main()

    run_virtual(bounded())


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        (None, None),
        ([-1.0, -2.0], None),
        ([-1.25, -1.75], None),  # just what is allowed
        ([-1.0, -2.5], "0.5"),
        ([-1.375, -2.5], "0.5"),
        ([float("nan"), -9.0], "nan"),
        ([-9.0, float("nan")], "nan"),
    ],
)
def test_a_probe_names_the_worst_difference(found: list[float] | None, worst: str | None) -> None:
    probe = Probe((1, 2, 3), (-1.0, -2.0), 0.25)
    if worst is None:
        probe.check(found)
        return
    with pytest.raises(EngineFailed, match=rf"by {worst} nats \(allowed: 0.25\)"):
        probe.check(found)


def test_a_probe_that_answers_for_other_tokens_is_no_probe() -> None:
    with pytest.raises(ValueError, match="zip"):
        Probe((1, 2, 3), (-1.0, -2.0), 0.25).check([-1.0])
    Probe((), (), 0.25).check([-1.0])


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_an_update_in_its_order(in_flight: InFlight) -> None:
    async def main() -> None:
        probed = Noting([-1.0])
        proxy, clock = InferenceProxy([probed], 4), asyncio.get_running_loop().time
        changes: list[int] = []
        proxy.on_change = lambda: changes.append(proxy.version)
        await proxy.update(3, WEIGHTS, Probe((7, 8), (-1.0,), 0.1), in_flight)
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
        assert ("logprobs",) not in probed.calls  # what has nothing to say is not asked
        assert proxy.update_seconds == 1.0

    virtual(main)


@pytest.mark.parametrize("fails", ["fetch", "suspend", "update", "logprobs", "resume"])
def test_an_engine_that_fails_in_an_update_is_closed_and_its_requests_go_on(fails: str) -> None:
    async def main() -> None:
        bad, good = Noting([-1.0]), Noting([-1.0])
        proxy = InferenceProxy([bad, good], 1)
        probe = Probe((1, 2), (-1.0,), 0.1)
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


def test_when_the_last_engine_fails_the_update_says_so() -> None:
    async def main() -> None:
        alone = Noting()
        alone.fails.add("update")
        proxy = InferenceProxy([alone], 4)
        with pytest.raises(EngineFailed, match=r"^no engine is left: no update$"):
            await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        waits = InferenceProxy([Noting()], 4, replacement_seconds=5.0)
        waits._queue.live[0].engine.fails.add("update")  # type: ignore[attr-defined]
        await waits.update(0, WEIGHTS, NO_PROBE, "continue")  # another one may join
        assert waits.version == 0
        joins = Noting()
        await waits.join(0, joins)
        assert [call[:2] for call in joins.calls if call[0] in ("fetch", "update")] == [("fetch", 0), ("update", 0)]

    virtual(main)


def test_an_abort_reaches_the_engine_that_runs_the_request_and_no_other() -> None:
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
        assert (first.generation.ending, len(first.generation.tokens), first.version) == (Ending.ABORTED, 10, 0)
        assert (waiting.generation.id, waiting.generation.ending) == ("c", Ending.ABORTED)
        assert (waiting.generation.tokens, waiting.version) == ((), 0)
        assert (await tasks[1]).generation.ending is Ending.LENGTH
        assert proxy.running == 0

    virtual(main)


def test_an_engine_that_cannot_abort_is_out() -> None:
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
        assert [one.generation.ending for one in made] == [Ending.ABORTED] * 2
        await asyncio.sleep(0)
        assert bad.closed == 1

    virtual(main)


def test_a_request_is_told_when_it_starts_and_when_it_starts_again() -> None:
    async def main() -> None:
        proxy, starts = InferenceProxy([Noting()], 4), list[int]()
        task = asking(proxy, "a", RequestOptions(on_start=starts.append))
        await asyncio.sleep(1.0)
        assert starts == []  # there are no weights
        await proxy.update(0, WEIGHTS, NO_PROBE, "restart")
        await asyncio.sleep(1.0)
        assert starts == [0]
        await proxy.update(1, WEIGHTS, NO_PROBE, "restart")
        made = await task
        assert (starts, made.version, made.generation.id) == ([0, 1], 1, "a'")
        assert set(made.generation.versions) == {1}
        assert (proxy.restarted, proxy.taken_over) == (1, 0)

    virtual(main)


def test_the_lent_engine_is_the_idlest_and_its_requests_go_on() -> None:
    async def main() -> None:
        engines = [Noting(), Noting(), Noting()]
        proxy = InferenceProxy(engines, 2)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        tasks = [asking(proxy, name) for name in "abcde"]
        await asyncio.sleep(1.0)
        [idlest] = [place for place, lane in proxy._queue.places.items() if lane.taken == 1]
        async with proxy.lent() as engine:
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
    async with proxy.lent() as engine:
        assert isinstance(engine, Noting)
        engine.kill()


def test_two_engines_are_enough_to_lend_one_and_one_that_died_there_is_told() -> None:
    async def main() -> None:
        engines = [Noting(), Noting()]
        proxy = InferenceProxy(engines, 2)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        with pytest.raises(EngineFailed, match="the timed engine was killed"):
            await killed(proxy)
        assert list(proxy.failed.values()) == ["the timed engine was killed"]
        with pytest.raises(EngineFailed, match="there are not two that live"):
            async with proxy.lent():
                pass

    virtual(main)


def test_an_engine_that_is_replaced_hands_its_requests_over() -> None:
    async def main() -> None:
        old, new = Noting(), Noting()
        proxy = InferenceProxy([old], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        changes: list[int] = []
        task = asking(proxy, "a")
        await asyncio.sleep(1.0)
        proxy.on_change = lambda: changes.append(proxy.version)
        await proxy.join(0, new)
        assert changes
        made = await task
        assert (proxy.taken_over, old.closed, len(made.generation.tokens), made.version) == (1, 1, 40, 0)
        assert ("abort", "a") in old.calls

    virtual(main)


def test_the_pace_of_an_engine_is_that_of_the_tokens_it_made_itself() -> None:
    async def main() -> None:
        first, second = Noting(), Noting()
        proxy = InferenceProxy([first], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        task = asking(proxy, "a")
        await asyncio.sleep(1.05)
        await proxy.join(0, second)
        await task
        [lane] = proxy._queue.live
        assert lane.tokens == 25  # the first made 10, and 5 more while the second took the weights
        assert lane.seconds == pytest.approx(2.5)

    virtual(main)


class Refusing(Noting):
    """Dies as soon as it is asked."""

    async def generate(self, request: GenerationRequest) -> Generation:
        raise EngineFailed("refused")


def test_what_never_started_counts_from_the_version_at_its_end() -> None:
    async def main() -> None:
        proxy = InferenceProxy([Refusing()], 4)
        await proxy.update(0, WEIGHTS, NO_PROBE, "continue")
        with pytest.raises(EngineFailed, match="no engine is left: refused"):
            await proxy.generate(request("a"))
        assert (proxy.running, proxy.restarted) == (0, 1)

    virtual(main)
