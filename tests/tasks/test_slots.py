"""Random tests of the queue for the slots of engines. A ticket is a request for slots. Tickets are withdrawn, cancelled
and failed at any time, even between a grant and the wake-up of the waiting task, while engines suspend, die and join.
The queue for whole groups is tested in the same way, with tickets for several slots.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.baselines import WholeGroupQueue
from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.slots import EngineSlots, SlotQueue, Ticket
from rollflow.tasks.runtime.clock import VirtualClockLoop, run_virtual
from tests.support.counts import examples
from tests.support.tickets import width

SLOTS = 3
PATIENCE = 5.0
TIMED = TimedEngineConfig(
    max_concurrent_requests=SLOTS, median_tokens=4, max_new_tokens=12, seconds_per_token=0.1, update_seconds=0.1
)


@dataclass(eq=False)
class Holder:
    """A task with a ticket. The task waits for slots, holds them until `go` is set, and frees them."""

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
    """A machine whose rules change the queue at random. Nothing is awaited between two rules except by the rule
    `settle`, so any unfinished changes can meet.
    """

    def __init__(self, queue: SlotQueue | None = None) -> None:
        super().__init__()
        self.loop = VirtualClockLoop()
        self.queue = queue or SlotQueue("prefix", PATIENCE)
        self.holders: list[tuple[Holder, asyncio.Task[None]]] = []
        self.all: list[EngineSlots] = []
        self.cancelled: list[asyncio.Task[None]] = []
        self.step(self.join, 0)

    def step(self, function: Any, *arguments: Any) -> None:
        """Call a function inside the loop, and let the loop run once."""

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
        """Add an engine as the proxy does: the engine serves at once, and replaces the previous engine with the same
        number.
        """
        lane = EngineSlots(TimedEngine(TIMED), SLOTS)
        lane.serves.set()
        self.all.append(lane)
        old = self.queue.put(place, lane)
        if old is not None and old.failure is None:
            old.failure = EngineFailed("replaced")
            self.queue.offer_slots(old)

    @rule(place=st.integers(0, 2))
    def an_engine_joins(self, place: int) -> None:
        self.step(self.join, place)

    @rule(priority=st.integers(0, 3), group=st.integers(0, 2), width=st.integers(1, SLOTS))
    def somebody_asks(self, priority: int, group: int, width: int) -> None:
        holder = Holder(self.queue, self.ticket(priority, group, width))
        self.holders.append((holder, self.loop.create_task(holder.run())))

    def ticket(self, priority: int, group: int, width: int) -> Ticket:
        return self.queue.create_ticket(priority, group)

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
                self.cancel(waiting[1])  # the ticket may have got its slots, which its task does not know yet

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
        return ticket.lane is not None or (ticket.granted is not None and ticket.granted.done())

    @precondition(lambda self: self.queue.live)
    @rule(number=st.integers(0, 2))
    def an_engine_dies(self, number: int) -> None:
        lane = self.queue.live[number % len(self.queue.live)]
        lane.failure = EngineFailed("died")
        self.step(self.queue.offer_slots, lane)

    @precondition(lambda self: self.queue.live)
    @rule(number=st.integers(0, 2))
    def an_engine_suspends_or_resumes(self, number: int) -> None:
        lane = self.queue.live[number % len(self.queue.live)]
        if lane.serves.is_set():
            lane.serves.clear()
        else:
            lane.serves.set()
            self.step(self.queue.offer_slots, lane)

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
        """Check that the number of taken slots of each engine is the sum over the tickets that hold them."""
        for lane in self.all:
            assert 0 <= lane.taken <= lane.slots
            granted = [h.ticket for h, task in self.holders if not task.done() and h.ticket.lane is lane]
            assert lane.taken == sum(width(ticket) for ticket in granted if ticket not in self.left)

    @property
    def left(self) -> list[Ticket]:
        return [holder.ticket for holder, _ in self.holders if holder.outcome == "released"]

    @invariant()
    def live_engines_are_counted(self) -> None:
        assert self.queue.alive == len(self.queue.live)

    @invariant()
    def nobody_waits_while_he_fits(self) -> None:
        """Check that no engine has room for the first ticket in the queue (by priority, then by arrival)."""
        waiting = [holder.ticket for holder, task in self.holders if not task.done() and holder.ticket.waits]
        if waiting:
            first = min(waiting, key=lambda ticket: ticket.turn)
            assert max((lane.free for lane in self.queue.live), default=0) < width(first)

    def teardown(self) -> None:
        """End all tasks, and check that every slot is free."""
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
    max_examples=examples(150), stateful_step_count=40, deadline=None, phases=set(Phase) - {Phase.explain}
)
TestLanes = pytest.mark.many(LanesMachine.TestCase)


class WholeGroupsMachine(LanesMachine):
    """The same machine with tickets for several slots of one engine."""

    def __init__(self) -> None:
        self.groups = WholeGroupQueue(SLOTS, PATIENCE)
        super().__init__(self.groups)

    def ticket(self, priority: int, group: int, width: int) -> Ticket:
        return self.groups.create_ticket(priority, width=width)


WholeGroupsMachine.TestCase.settings = LanesMachine.TestCase.settings
TestWholeGroups = pytest.mark.many(WholeGroupsMachine.TestCase)


async def waiting(queue: SlotQueue, ticket: Ticket) -> asyncio.Task[EngineSlots | None]:
    """Let a ticket wait in the queue or get its slots."""
    task = asyncio.create_task(queue.take(ticket))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("how", ["cancelled", "withdrawn"])
def test_smaller_request_starts_after_a_large_one_withdraws(how: str) -> None:
    async def main() -> None:
        queue, lane = WholeGroupQueue(SLOTS, PATIENCE), EngineSlots(TimedEngine(TIMED), SLOTS)
        lane.serves.set()
        queue.put(0, lane)
        wide = queue.create_ticket(0, width=SLOTS)
        holds = await waiting(queue, queue.create_ticket(0))
        leaves = await waiting(queue, wide)
        behind = await waiting(queue, queue.create_ticket(0))
        assert holds.done()
        assert not behind.done()
        if how == "cancelled":
            leaves.cancel()
        else:
            queue.withdraw(wide)
        async with asyncio.timeout(1):
            assert await behind is not None

    run_virtual(main())


def test_cancellation_of_a_request_wins_over_its_failure() -> None:
    async def main() -> None:
        queue = SlotQueue("least-work", PATIENCE)
        task = await waiting(queue, queue.create_ticket(0))
        queue._give_up()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
