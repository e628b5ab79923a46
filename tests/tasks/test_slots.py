"""The queue before the engines, attacked: tickets are withdrawn, cancelled and given up at any moment, even between the
grant and the wake-up, while engines suspend, die and join. So is the one for groups, with tickets of any width."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.clock import VirtualClockLoop, run_virtual
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout import build_proxy
from rollflow.tasks.rollout.baselines import GroupTicket, WholeGroupProxy, WholeGroupQueue
from rollflow.tasks.rollout.config import AnyRouting
from rollflow.tasks.rollout.proxy import Probe, RequestOptions
from rollflow.tasks.rollout.slots import Lane, SlotQueue, Ticket
from tests.support.counts import examples

SLOTS = 3
PATIENCE = 5.0
NO_PROBE = Probe((), (), 0.1)
TIMED = TimedEngineConfig(slots=SLOTS, median_tokens=4, max_new_tokens=12, seconds_per_token=0.1, update_seconds=0.1)


def width(ticket: Ticket) -> int:
    """Slots that it is for."""
    return ticket.width if isinstance(ticket, GroupTicket) else 1


@dataclass(eq=False)
class Holder:
    """Somebody with a ticket: it waits, holds what it was granted until it is told to go, and gives it back."""

    queue: SlotQueue
    ticket: Ticket
    go: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str = "waits"

    async def run(self) -> None:
        try:
            lane = await self.queue.take(self.ticket)
        except EngineFailed:
            self.outcome = "given up"
            return
        if lane is None:
            self.outcome = "withdrawn"
            return
        self.outcome = "holds"
        try:
            await self.go.wait()
        finally:
            self.queue.release(lane, self.ticket)
            self.outcome = "released"


class LanesMachine(RuleBasedStateMachine):
    """Nothing is awaited between two rules, unless the rule is `settle`: so everything meets everything half done."""

    def __init__(self, queue: SlotQueue | None = None) -> None:
        super().__init__()
        self.loop = VirtualClockLoop()
        self.queue = queue or SlotQueue("prefix", PATIENCE)
        self.holders: list[tuple[Holder, asyncio.Task[None]]] = []
        self.all: list[Lane] = []
        self.cancelled: list[asyncio.Task[None]] = []
        self.step(self.join, 0)

    def step(self, function: Any, *arguments: Any) -> None:
        """Call it inside the loop, and give it one turn of its queue."""

        async def once() -> None:
            function(*arguments)

        self.loop.run_until_complete(once())

    def pick(self, number: int, outcome: str) -> tuple[Holder, asyncio.Task[None]] | None:
        found = [pair for pair in self.holders if pair[0].outcome == outcome and not pair[1].done()]
        return found[number % len(found)] if found else None

    def cancel(self, task: asyncio.Task[None]) -> None:
        if task.cancel():
            self.cancelled.append(task)

    def join(self, place: int) -> None:
        """As the proxy does: it serves already, and what was there is out."""
        lane = Lane(TimedEngine(TIMED), SLOTS)
        lane.serves.set()
        self.all.append(lane)
        old = self.queue.put(place, lane)
        if old is not None and old.failure is None:
            old.failure = EngineFailed("replaced")
            self.queue.changed(old)

    @rule(place=st.integers(0, 2))
    def an_engine_joins(self, place: int) -> None:
        self.step(self.join, place)

    @rule(priority=st.integers(0, 3), group=st.integers(0, 2), width=st.integers(1, SLOTS))
    def somebody_asks(self, priority: int, group: int, width: int) -> None:
        holder = Holder(self.queue, self.ticket(priority, group, width))
        self.holders.append((holder, self.loop.create_task(holder.run())))

    def ticket(self, priority: int, group: int, width: int) -> Ticket:
        return self.queue.ticket(priority, group)

    @rule(number=st.integers(0, 9))
    def one_is_done(self, number: int) -> None:
        if found := self.pick(number, "holds"):
            self.step(found[0].go.set)

    @rule(number=st.integers(0, 9), outcome=st.sampled_from(["waits", "holds"]))
    def one_is_cancelled(self, number: int, outcome: str) -> None:
        if found := self.pick(number, outcome):
            self.step(self.cancel, found[1])

    @rule(number=st.integers(0, 9))
    def one_is_withdrawn(self, number: int) -> None:
        if found := self.pick(number, "waits"):
            self.step(self.queue.withdraw, found[0].ticket)

    @rule(number=st.integers(0, 9))
    def one_ends_as_another_is_cancelled(self, number: int) -> None:
        done, waiting = self.pick(number, "holds"), self.pick(number, "waits")
        if done and waiting:

            async def both() -> None:
                done[0].go.set()
                while not self.done(waiting[0].ticket) and done[0].outcome == "holds":
                    await asyncio.sleep(0)
                self.cancel(waiting[1])  # it may have been granted, and not know it yet

            self.loop.run_until_complete(both())

    @precondition(lambda self: self.queue.vacant)
    @rule(number=st.integers(0, 9))
    def all_are_given_up_as_one_is_cancelled(self, number: int) -> None:
        if found := self.pick(number, "waits"):

            def both() -> None:
                self.queue._give_up()
                self.cancel(found[1])

            self.step(both)

    @staticmethod
    def done(ticket: Ticket) -> bool:
        return ticket.granted is not None and ticket.granted.done()

    @precondition(lambda self: self.queue.live)
    @rule(number=st.integers(0, 2))
    def an_engine_dies(self, number: int) -> None:
        lane = self.queue.live[number % len(self.queue.live)]
        lane.failure = EngineFailed("died")
        self.step(self.queue.changed, lane)

    @precondition(lambda self: self.queue.live)
    @rule(number=st.integers(0, 2))
    def an_engine_suspends_or_resumes(self, number: int) -> None:
        lane = self.queue.live[number % len(self.queue.live)]
        if lane.serves.is_set():
            lane.serves.clear()
        else:
            lane.serves.set()
            self.step(self.queue.changed, lane)

    @rule(seconds=st.sampled_from([0.0, 1.0, PATIENCE]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.settle()

    @rule()
    def settle(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    @invariant()
    def slots_are_those_of_who_holds_them(self) -> None:
        """Counted when everybody knows what he was granted."""
        for lane in self.all:
            assert 0 <= lane.taken <= lane.slots
            granted = [h.ticket for h, task in self.holders if not task.done() and h.ticket.lane is lane]
            assert lane.taken == sum(width(ticket) for ticket in granted if ticket not in self.left)

    @property
    def left(self) -> list[Ticket]:
        return [holder.ticket for holder, _ in self.holders if holder.outcome == "released"]

    @invariant()
    def nobody_waits_while_he_fits(self) -> None:
        """The first in the queue, by priority and then by arrival, finds no engine with room for it."""
        waiting = [holder.ticket for holder, task in self.holders if not task.done() and holder.ticket.waits]
        if waiting:
            first = min(waiting, key=lambda ticket: ticket.turn)
            assert max((lane.free for lane in self.queue.live), default=0) < width(first)

    def teardown(self) -> None:
        """Everybody ends, and every slot is free."""
        self.step(self.join, 0)
        for _ in range(len(self.holders) + 1):
            for holder, _ in self.holders:
                self.step(holder.go.set)
            self.settle()
        assert all(task.done() for _, task in self.holders)
        assert all(task.cancelled() or task.exception() is None for _, task in self.holders)
        assert all(task.cancelled() for task in self.cancelled)
        assert all(lane.taken == 0 for lane in self.all)
        assert self.queue.waiting == 0
        self.loop.close()


LanesMachine.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=40, deadline=None, phases=set(Phase) - {Phase.explain}
)
TestLanes = pytest.mark.many(LanesMachine.TestCase)


class WholeGroupsMachine(LanesMachine):
    """The same, where a ticket may be for several slots of one engine."""

    def __init__(self) -> None:
        self.groups = WholeGroupQueue(SLOTS, PATIENCE)
        super().__init__(self.groups)

    def ticket(self, priority: int, group: int, width: int) -> Ticket:
        return self.groups.ticket(priority, width=width)


WholeGroupsMachine.TestCase.settings = LanesMachine.TestCase.settings
TestWholeGroups = pytest.mark.many(WholeGroupsMachine.TestCase)


async def waiting(queue: SlotQueue, ticket: Ticket) -> asyncio.Task[Lane | None]:
    """It stands in the queue, or has its slots."""
    task = asyncio.create_task(queue.take(ticket))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("how", ["cancelled", "withdrawn"])
def test_when_a_wide_ticket_leaves_the_queue_those_behind_it_go(how: str) -> None:
    async def main() -> None:
        queue, lane = WholeGroupQueue(SLOTS, PATIENCE), Lane(TimedEngine(TIMED), SLOTS)
        lane.serves.set()
        queue.put(0, lane)
        wide = queue.ticket(0, width=SLOTS)
        holds = await waiting(queue, queue.ticket(0))
        leaves = await waiting(queue, wide)
        behind = await waiting(queue, queue.ticket(0))
        assert holds.done()
        assert not behind.done()
        if how == "cancelled":
            leaves.cancel()
        else:
            queue.withdraw(wide)
        async with asyncio.timeout(1):
            assert await behind is not None

    run_virtual(main())


def test_who_is_cancelled_and_given_up_at_the_same_time_is_cancelled() -> None:
    async def main() -> None:
        queue = SlotQueue("least-work", PATIENCE)
        task = await waiting(queue, queue.ticket(0))
        queue._give_up()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


# --- the proxy above it ---------------------------------------------------------------------------------------


class Strict(TimedEngine):
    """Refuses more requests than slots; what it is told takes effect a moment later."""

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
    """Asks the proxy for all sorts of things. Requests are numbered; a seed is a number, so answers are known."""

    routing: AnyRouting
    in_flight: InFlight
    tasks: dict[int, asyncio.Task[Ending]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)

    async def run(self, events: list[tuple[float, str, int, int]]) -> None:
        self.proxy = build_proxy([Strict(TIMED), Strict(TIMED)], SLOTS, 1e6, self.routing)
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
                assert outcome in (Ending.STOP, Ending.LENGTH) or number in self.aborted, outcome
        assert self.proxy.running == 0
        assert all(lane.taken == 0 for lane in self.proxy._queue.places.values())

    async def change(self, at: float, what: str, number: int, many: int) -> None:
        await asyncio.sleep(at)
        match what:
            case "ask together" if isinstance(self.proxy, WholeGroupProxy):
                self.ask(self.together(self.proxy.queue, len(self.tasks), many + number, number))
            case "ask" | "ask together":
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
        for _ in range(4):  # a cancelled one has to hear of it
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Nobody waits while there is room."""
        queue = self.proxy._queue
        waiting = [ticket for _, ticket in queue._queue if ticket.waits]
        if waiting:
            first = min(waiting, key=lambda ticket: ticket.turn)
            assert max((lane.free for lane in queue.live), default=0) < width(first)

    def some(self, number: int, width: int) -> list[int]:
        running = [key for key, task in self.tasks.items() if not task.done()]
        return running[number : number + width]

    async def abort(self, number: int, width: int) -> None:
        """They end at once, unless an engine is in the middle of an update."""
        chosen = self.some(number, width)
        self.aborted |= set(chosen)
        alone = [key for key in chosen if f"r{key}" in self.proxy._jobs]
        await self.proxy.abort([f"r{key}{of_group}" for key in chosen for of_group in ("", ".0", ".1", ".2")])
        await asyncio.sleep(2 * TIMED.update_seconds + 0.1)
        assert all(self.tasks[key].done() for key in alone), "an aborted request goes on"

    def ask(self, coroutine: Coroutine[Any, Any, Ending]) -> None:
        self.tasks[len(self.tasks)] = asyncio.create_task(coroutine)

    async def together(self, queue: WholeGroupQueue, number: int, size: int, priority: int) -> Ending:
        """A group that holds slots of one engine until its last response ends; it may be wider than an engine."""
        group = f"group {number}"
        await queue.hold(group, size, priority)
        try:
            one_by_one = range(0, size, SLOTS)  # as many at a time as it holds slots
            for first in one_by_one:
                samples = range(first, min(first + SLOTS, size))
                endings = await asyncio.gather(*(self.one(f"{number}.{i}", priority, group) for i in samples))
            return endings[-1]
        finally:
            queue.give_back(group)

    async def one(self, name: str, priority: int, group: str = "") -> Ending:
        request = GenerationRequest(f"r{name}", (1,), 12, seed=priority)
        asked = RequestOptions(priority, group or priority)
        return Ending((await self.proxy.generate(request, asked)).generation.ending)


EVENTS = st.tuples(
    st.integers(0, 40).map(lambda twentieths: twentieths / 20),
    st.sampled_from(["ask", "ask together", "abort", "cancel", "kill", "join", "update"]),
    st.integers(0, 5),
    st.integers(1, SLOTS),
)


@pytest.mark.many
@settings(max_examples=examples(600), deadline=None, phases=set(Phase) - {Phase.explain})
@given(
    st.lists(EVENTS, max_size=16),
    st.sampled_from(["least-work", "prefix", "group"]),
    st.sampled_from(["continue", "restart"]),
)
def test_whatever_is_asked_of_the_proxy_everything_ends(
    events: list[tuple[float, str, int, int]], routing: AnyRouting, in_flight: InFlight
) -> None:
    run_virtual(Crowd(routing, in_flight).run([(0.0, "ask", 1, 3), (0.0, "ask together", 0, 2), *events]))
