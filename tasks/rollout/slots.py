"""The slot queue: decides which inference engine runs which request, and when. All engines share one queue.

- A request waits in the queue until an engine has a free slot, so an engine never has more requests than slots.
- The request with the lowest priority number runs first; among equal priorities, the oldest request runs first. A
  request whose engine failed keeps its place in the queue.
- `least-work` routing chooses the engine with the smallest product of running requests and measured seconds per token.
  `prefix` routing prefers an engine that already runs the same prompt.
- While no engine is alive, requests wait up to `replacement_seconds` for a new engine, and then fail with
  `EngineFailed`.

The choice of an engine costs O(log engines) per request.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.rollout.config import Routing

MEMORY = 0.9  # weight of the previous value in an exponential moving average


@dataclass(eq=False, slots=True)
class EngineSlots:
    """An engine with its slots (places for concurrent requests), its measured speed, and the reason of its failure."""

    engine: Engine
    slots: int
    taken: int = 0
    failure: EngineFailed | None = None
    # set while the engine takes requests; cleared during a weight update
    serves: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: float = 0.0  # moving average of the number of tokens per response; 0 before the first response
    seconds: float = 0.0  # moving average of seconds per response
    stamp: int = 0  # number of the engine's newest entry in the heap of engines with free slots

    @property
    def free(self) -> int:
        """Number of free slots of the engine; 0 while the engine takes no requests."""
        return self.slots - self.taken if self.failure is None and self.serves.is_set() else 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Update the engine's measured speed with a response of `tokens` tokens that took `seconds`."""
        weight = 1 - MEMORY if self.tokens else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(eq=False, slots=True)
class Ticket:
    """A request's place in the queue for an engine. With `prefix` routing, requests with equal `group` prefer the same
    engine."""

    priority: float
    arrival: int
    group: Hashable = None
    lane: EngineSlots | None = None  # the engine that gave the request a slot; None while the request waits
    granted: asyncio.Future[EngineSlots | None] | None = None  # future of the engine, while the request waits for it
    episode: str = ""  # name of the episode of which the request is a turn
    tokens: int = 0  # number of tokens of the episode; includes the request's tokens once the request has ended

    @property
    def turn(self) -> tuple[float, int]:
        """The sort key of the request: the priority, then the order of arrival."""
        return self.priority, self.arrival

    @property
    def waits(self) -> bool:
        """True if the request still waits in the queue."""
        return self.granted is not None and not self.granted.done()

    def wait(self) -> None:
        """Let the request wait for a slot."""
        self.lane, self.granted = None, asyncio.get_running_loop().create_future()

    def grant(self, lane: EngineSlots) -> None:
        """Give the request a slot of an engine."""
        self.lane = lane
        if self.granted is not None:
            self.granted.set_result(lane)


class SlotQueue:
    """The inference engines and the queue of requests for them."""

    def __init__(self, routing: Routing, replacement_seconds: float) -> None:
        self._routing = routing
        self._replacement_seconds = replacement_seconds
        self._places: dict[int, EngineSlots] = {}
        self._queue: list[tuple[tuple[float, int], Ticket]] = []
        self._open: list[tuple[float, int, EngineSlots]] = []  # heap of engines with free slots: (load, stamp, engine)
        self._homes: dict[
            Hashable, tuple[EngineSlots, int]
        ] = {}  # group -> the engine that runs the group's requests, and the number of these requests
        self._measured: EngineSlots | None = None  # engine whose speed is assumed for engines without a response
        self._stamps = itertools.count(1)
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._alive: int | None = None  # number of engines that have not failed; None if it has to be counted

    @property
    def live(self) -> list[EngineSlots]:
        """The engines that have not failed."""
        return [lane for lane in self._places.values() if lane.failure is None]

    @property
    def alive(self) -> int:
        """Number of engines that have not failed."""
        if self._alive is None:
            self._alive = len(self.live)
        return self._alive

    @property
    def vacant(self) -> bool:
        """True if no engine is alive."""
        return not any(lane.failure is None for lane in self._places.values())

    @property
    def places(self) -> dict[int, EngineSlots]:
        """All engines with their slots, keyed by the engine's number."""
        return self._places

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine; the count takes a pass over the whole queue."""
        return sum(ticket.waits for _, ticket in self._queue)

    def create_ticket(self, priority: float, group: Hashable = None) -> Ticket:
        """Create a ticket that is served after all other tickets of the same priority."""
        return Ticket(priority, next(self._arrivals), group if self._routing == "prefix" else None)

    def put(self, place: int, lane: EngineSlots) -> EngineSlots | None:
        """Register an engine under number `place`; return the previous engine with this number, if any."""
        old, self._places[place], self._alive = self._places.get(place), lane, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.offer_slots(lane)
        return old

    def remove(self, lane: EngineSlots) -> None:
        """Remove an engine, which gets no more requests."""
        self._places = {place: other for place, other in self._places.items() if other is not lane}
        self._alive = None

    async def take(self, ticket: Ticket) -> EngineSlots | None:
        """Wait until an engine has a slot for the request; return the engine, or None if the request was withdrawn.

        Raises:
            EngineFailed: no engine is alive, and no engine joined in time.
        """
        if not self._queue and (lane := self._choose(ticket)) is not None:
            self._grant(ticket, lane)
            return lane
        ticket.wait()
        heapq.heappush(self._queue, (ticket.turn, ticket))
        self._dispatch()
        return await self._wait(ticket)

    async def _wait(self, ticket: Ticket) -> EngineSlots | None:
        assert ticket.granted is not None
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            if lane := ticket.lane:  # the request got a slot just before this coroutine was cancelled
                self.release(lane, ticket)
            raise
        finally:
            ticket.granted = None

    def release(self, lane: EngineSlots, ticket: Ticket) -> None:
        """Free the slot of the engine that the ticket's request has used."""
        lane.taken -= 1
        if ticket.group is not None and (home := self._homes.get(ticket.group)) and home[0] is lane:
            self._homes[ticket.group] = (lane, home[1] - 1)
            if home[1] == 1:
                del self._homes[ticket.group]
        self.offer_slots(lane)

    def end_episode(self, episode: str) -> None:
        """Do nothing, because this queue stores nothing about an episode."""

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a waiting request from the queue."""
        if ticket.waits and ticket.granted is not None:
            ticket.granted.set_result(None)

    def observe(self, lane: EngineSlots, tokens: int, seconds: float) -> None:
        """Record that an engine took `seconds` seconds for a response of `tokens` tokens."""
        lane.observe(tokens, seconds)
        if lane.tokens:
            self._measured = self._measured or lane

    def offer_slots(self, lane: EngineSlots) -> None:
        """Give an engine's free slots to waiting requests; call this after the engine's slots have changed."""
        if lane.failure is not None:
            self._alive = None
        self._offer(lane)
        self._dispatch()

    def _offer(self, lane: EngineSlots) -> None:
        if lane.free <= 0:
            return
        lane.stamp = next(self._stamps)
        entry = self._load(lane), lane.stamp, lane
        if self._open and self._open[0][2] is lane:  # the first heap entry is outdated now
            heapq.heapreplace(self._open, entry)
        else:
            heapq.heappush(self._open, entry)
        if len(self._open) > 4 * len(self._places) + 64:  # The heap is rebuilt when most of its entries are outdated.
            self._open = [entry for entry in self._open if entry[1] == entry[2].stamp]
            heapq.heapify(self._open)

    def _load(self, lane: EngineSlots) -> float:
        """Estimate the engine's seconds per token if it runs one more request."""
        if not lane.tokens:
            known = self._measured
            return (lane.taken + 1) * (known.seconds / known.tokens if known else 1.0)
        return (lane.taken + 1) * lane.seconds / lane.tokens

    def _dispatch(self) -> None:
        """Give free slots to waiting requests, in the order of the queue."""
        while self._queue:
            ticket = self._queue[0][1]
            if ticket.waits:
                lane = self._choose(ticket)
                if lane is None:
                    break
                self._grant(ticket, lane)
            heapq.heappop(self._queue)
        if self._queue and self._timer is None and self.vacant:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._replacement_seconds, self._give_up)

    def _grant(self, ticket: Ticket, lane: EngineSlots) -> None:
        lane.taken += 1
        if ticket.group is not None:
            home = self._homes.get(ticket.group)
            if home is None or home[0] is lane:
                self._homes[ticket.group] = (lane, home[1] + 1 if home else 1)
        self._offer(lane)
        ticket.grant(lane)

    def _choose(self, ticket: Ticket) -> EngineSlots | None:
        if ticket.group is not None and (home := self._homes.get(ticket.group)) and home[0].free > 0:
            return home[0]
        while self._open:
            _, stamp, lane = self._open[0]
            if stamp == lane.stamp and lane.free > 0:
                return lane
            heapq.heappop(self._open)
        return None

    def _give_up(self) -> None:
        """Fail all waiting requests, because no engine joined in time."""
        self._timer = None
        waiting, self._queue = self._queue, []
        for _, ticket in waiting:
            if ticket.waits and ticket.granted is not None:
                ticket.granted.set_exception(self.build_no_engine_error())

    def build_no_engine_error(self) -> EngineFailed:
        """Build the error that says why each engine failed."""
        reasons = (str(lane.failure) for lane in self._places.values())
        return EngineFailed(f"no engine is left that can run requests: {'; '.join(reasons) or 'no engine has started'}")
