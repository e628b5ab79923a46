"""Random calls to the proxy and its queue, many at a time, while engines die, join and are updated."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.counts import examples

SLOTS = 3
NO_PROBE = WeightsProbe((), (), 0.1)
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
        for _ in range(4):  # a cancelled task needs some turns of the loop
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Check that no request waits while there is room."""
        queue = self.proxy._queue
        if any(ticket.waits for _, ticket in queue._queue):
            assert not any(lane.free for lane in queue.live)

    def some(self, number: int, width: int) -> list[int]:
        running = [key for key, task in self.tasks.items() if not task.done()]
        return running[number : number + width]

    async def abort(self, number: int, width: int) -> None:
        """Check that they end immediately, unless an engine is being updated."""
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
def test_every_request_to_the_proxy_ends(
    events: list[tuple[float, str, int, int]], routing: Routing, in_flight: InFlight
) -> None:
    run_virtual(Crowd(routing, in_flight).run([(0.0, "ask", 1, 3), (0.0, "ask", 0, 2), *events]))
