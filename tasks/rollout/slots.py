"""Which request goes to which engine, and when: one queue before all engines.

- A request waits here, not at an engine, until a serving engine has a free slot. The first engine with a free slot gets
  the work, be it one that was busy or one that joins. So an engine never gets more than its slots.
- The lowest priority number goes first, then the earliest arrival. A request that comes back from a dead engine keeps
  its turn.
- `least-work` routing takes the engine that would be done first: requests it runs, times its own measured pace.
  `prefix` prefers an engine that runs the same prompt already, while it has a free slot.
- While no engine lives, requests wait `replacement_seconds` for one to join; then they fail with `EngineFailed`.

Choosing costs O(log engines) a request, however many are in flight.
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

MEMORY = 0.9  # of the measured pace: weight of what was known before a response


@dataclass(eq=False, slots=True)
class Lane:
    """One engine: its slots, how many are taken, its pace, whether it serves, why it was taken out."""

    engine: Engine
    slots: int
    taken: int = 0
    failure: EngineFailed | None = None
    serves: asyncio.Event = field(default_factory=asyncio.Event)  # not before weights, not in an update
    tokens: float = 0.0  # made by one response lately, on average; 0: not measured
    seconds: float = 0.0
    stamp: int = 0  # of its newest entry among the free lanes

    @property
    def free(self) -> int:
        """Slots that may be given out now."""
        return self.slots - self.taken if self.failure is None and self.serves.is_set() else 0

    def observe(self, tokens: int, seconds: float) -> None:
        """A response made so many tokens in so much time."""
        weight = 1 - MEMORY if self.tokens else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(eq=False, slots=True)
class Ticket:
    """A place in the queue, for a slot of one engine. Tickets of one `group` should run on one engine."""

    turn: tuple[float, int]  # priority, arrival
    group: Hashable = None
    granted: asyncio.Future[Lane | None] | None = None

    @property
    def waits(self) -> bool:
        """Whether it stands in the queue."""
        return self.granted is not None and not self.granted.done()

    @property
    def lane(self) -> Lane | None:
        """The lane that it was granted; None while it waits."""
        future = self.granted
        if future is None or not future.done() or future.cancelled() or future.exception():
            return None
        return future.result()


class SlotQueue:
    """The engines by their place, and the queue before them. See the module's docstring for the guarantees."""

    def __init__(self, routing: Routing, replacement_seconds: float) -> None:
        self._routing = routing
        self._replacement_seconds = replacement_seconds
        self._places: dict[int, Lane] = {}
        self._queue: list[tuple[tuple[float, int], Ticket]] = []
        self._open: list[tuple[float, int, Lane]] = []  # lanes with free slots: load, stamp (no two alike), lane
        self._homes: dict[Hashable, tuple[Lane, int]] = {}  # group -> where it runs, with how many requests
        self._measured: Lane | None = None  # whose pace stands for that of lanes that have made nothing yet
        self._stamps = itertools.count(1)
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def live(self) -> list[Lane]:
        """The lanes that were not taken out."""
        return [lane for lane in self._places.values() if lane.failure is None]

    @property
    def vacant(self) -> bool:
        """Whether no engine lives."""
        return not any(lane.failure is None for lane in self._places.values())

    @property
    def places(self) -> dict[int, Lane]:
        """All lanes."""
        return self._places

    @property
    def waiting(self) -> int:
        """Requests that no engine has yet; walks the queue."""
        return sum(ticket.waits for _, ticket in self._queue)

    def ticket(self, priority: float, group: Hashable = None) -> Ticket:
        """A place at the end of those with this priority."""
        return Ticket((priority, next(self._arrivals)), group if self._routing == "prefix" else None)

    def put(self, place: int, lane: Lane) -> Lane | None:
        """Put a lane in its place; returns the one that was there."""
        old, self._places[place] = self._places.get(place), lane
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.changed(lane)
        return old

    def remove(self, lane: Lane) -> None:
        """Take a lane out of its place."""
        self._places = {place: other for place, other in self._places.items() if other is not lane}

    async def take(self, ticket: Ticket) -> Lane | None:
        """Wait for an engine; its slot is the ticket's until `release`. None: the ticket was withdrawn.

        Raises:
            EngineFailed: no engine lives, and none has joined in time.
        """
        ticket.granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (ticket.turn, ticket))
        self._dispatch()
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            if lane := ticket.lane:  # it was granted a moment ago
                self.release(lane, ticket)
            raise

    def release(self, lane: Lane, ticket: Ticket) -> None:
        """The ticket's slot is free again."""
        lane.taken -= 1
        if ticket.group is not None and (home := self._homes.get(ticket.group)) and home[0] is lane:
            self._homes[ticket.group] = (lane, home[1] - 1)
            if home[1] == 1:
                del self._homes[ticket.group]
        self.changed(lane)

    def withdraw(self, ticket: Ticket) -> None:
        """Take a waiting ticket out of the queue."""
        if ticket.waits and ticket.granted is not None:
            ticket.granted.set_result(None)

    def observed(self, lane: Lane, tokens: int, seconds: float) -> None:
        """A response of this lane made so many tokens in so much time."""
        lane.observe(tokens, seconds)
        if lane.tokens:
            self._measured = self._measured or lane

    def changed(self, lane: Lane) -> None:
        """Take note that a lane's slots have changed, or whether it serves."""
        self._offer(lane)
        self._dispatch()

    def _offer(self, lane: Lane) -> None:
        if lane.free <= 0:
            return
        lane.stamp = next(self._stamps)
        heapq.heappush(self._open, (self._load(lane), lane.stamp, lane))
        if len(self._open) > 4 * len(self._places) + 64:  # entries that a newer one of the same lane replaced
            self._open = [entry for entry in self._open if entry[1] == entry[2].stamp]
            heapq.heapify(self._open)

    def _load(self, lane: Lane) -> float:
        """Seconds that a token of one more request would take, if all requests ran in turn."""
        if not lane.tokens:
            known = self._measured
            return (lane.taken + 1) * (known.seconds / known.tokens if known else 1.0)
        return (lane.taken + 1) * lane.seconds / lane.tokens

    def _dispatch(self) -> None:
        """Give out free slots in the queue's order; the first ticket that finds none stops it."""
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

    def _grant(self, ticket: Ticket, lane: Lane) -> None:
        assert ticket.granted is not None
        lane.taken += 1
        if ticket.group is not None:
            home = self._homes.get(ticket.group)
            if home is None or home[0] is lane:
                self._homes[ticket.group] = (lane, home[1] + 1 if home else 1)
        self._offer(lane)
        ticket.granted.set_result(lane)

    def _choose(self, ticket: Ticket) -> Lane | None:
        if ticket.group is not None and (home := self._homes.get(ticket.group)) and home[0].free > 0:
            return home[0]
        while self._open:
            _, stamp, lane = self._open[0]
            if stamp == lane.stamp and lane.free > 0:
                return lane
            heapq.heappop(self._open)
        return None

    def _give_up(self) -> None:
        """No engine came in time: tell all that wait."""
        self._timer = None
        waiting, self._queue = self._queue, []
        for _, ticket in waiting:
            if ticket.waits and ticket.granted is not None:
                ticket.granted.set_exception(self.none_left())

    def none_left(self) -> EngineFailed:
        """Why there is no engine: each was taken out."""
        reasons = (str(lane.failure) for lane in self._places.values())
        return EngineFailed(f"no engine is left: {'; '.join(reasons) or 'none has started'}")
