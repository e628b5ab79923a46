"""What asynchronous rollout is measured against. None of it is in the way of what is used.

- `BatchScheduler`: batch after batch (`rollout.mode = "batch"`).
- `WholeGroupScheduler`, with `WholeGroupProxy`: no prompt replication (`rollout.routing = "group"`).
- `WholeGroupBatches`: both.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from rollflow.storage.records import Discard, Prompt, TrajectoryGroup
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.rollout.admission import Supply
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.issue_order import Issue
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.rollout.slots import Lane, SlotQueue, Ticket

WHOLE = -1  # in place of a sample: all of them

# --- batch after batch ------------------------------------------------------------------------------------------


class BatchScheduler(RolloutScheduler):
    """A wave of groups starts once all before it have ended, and rewards are given once the last response of the wave
    has ended."""

    _generated_all: asyncio.Event

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        if self._running:
            return
        self._generated_all = asyncio.Event()
        super()._start_groups(tasks)

    def _supply(self) -> Supply:
        """Requests may queue at the engines: nothing starts in their place."""
        return replace(super()._supply(), slots=math.inf)

    async def _generated(self, tokens: int) -> None:
        await super()._generated(tokens)
        await self._generated_all.wait()

    def _freed(self, responses: int) -> None:
        super()._freed(responses)
        if self._generating == 0:
            self._generated_all.set()


# --- whole groups -----------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class GroupTicket(Ticket):
    """For `width` slots of one engine, or for one of those that are held for its group."""

    width: int = 1
    within: Lane | None = None  # the engine that holds a slot for it


class WholeGroupQueue(SlotQueue):
    """A group holds slots of one engine until they are released. Its requests run there; if the engine dies, they go on
    elsewhere, one by one."""

    def __init__(self, slots: int, replacement_seconds: float) -> None:
        """`slots` of each engine."""
        super().__init__("least-work", replacement_seconds)
        self._slots = slots
        self._held: dict[Hashable, tuple[Lane, GroupTicket]] = {}

    async def hold(self, group: Hashable, width: int, priority: float) -> None:
        """Wait for `width` slots of one engine, or for all that it has.

        Raises:
            EngineFailed: no engine lives, and none has joined in time.
        """
        ticket = self.ticket(priority, width=min(width, self._slots))
        lane = await self.take(ticket)
        assert lane is not None, "nobody else has this ticket"
        self._held[group] = lane, ticket

    def give_back(self, group: Hashable) -> None:
        """The slots of a group are free again; a second call changes nothing."""
        if held := self._held.pop(group, None):
            self.release(*held)

    def ticket(self, priority: float, group: Hashable = None, width: int = 1) -> GroupTicket:
        """A place at the end of those with this priority."""
        within, _ = self._held.get(group, (None, None))
        return GroupTicket(super().ticket(priority).turn, width=width, within=within)

    async def take(self, ticket: Ticket) -> Lane | None:
        """See `SlotQueue`; a ticket whose group holds slots has one at once."""
        assert isinstance(ticket, GroupTicket)
        if ticket.within is not None and ticket.within.failure is None:
            return ticket.within
        ticket.within = None
        try:
            return await super().take(ticket)
        except asyncio.CancelledError:
            self._dispatch()  # those behind it may fit where it did not
            raise

    def release(self, lane: Lane, ticket: Ticket) -> None:
        """See `SlotQueue`; a slot that is held for a group stays so."""
        assert isinstance(ticket, GroupTicket)
        if lane is not ticket.within:
            lane.taken -= ticket.width - 1
            super().release(lane, ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """See `SlotQueue`; those behind it may fit where it did not."""
        super().withdraw(ticket)
        self._dispatch()

    def _grant(self, ticket: Ticket, lane: Lane) -> None:
        assert isinstance(ticket, GroupTicket)
        lane.taken += ticket.width - 1
        super()._grant(ticket, lane)

    def _choose(self, ticket: Ticket) -> Lane | None:
        assert isinstance(ticket, GroupTicket)
        if ticket.width == 1:
            return super()._choose(ticket)
        widest = max(self.live, key=lambda lane: lane.free, default=None)
        return widest if widest is not None and widest.free >= ticket.width else None


class WholeGroupProxy(InferenceProxy):
    """All engines as one, for requests that come in whole groups."""

    _queue: WholeGroupQueue

    def __init__(self, engines: Sequence[Engine], slots: int, replacement_seconds: float = 0.0) -> None:
        super().__init__([], slots, replacement_seconds)
        self._queue = WholeGroupQueue(slots, replacement_seconds)
        for place, engine in enumerate(engines):
            self._queue.put(place, Lane(engine, slots))

    @property
    def queue(self) -> WholeGroupQueue:
        """Where groups get their slots."""
        return self._queue


class WholeGroupRollout(GroupRollout):
    """It waits for slots for all of its requests, and holds them until its last response ends."""

    @property
    def _queue(self) -> WholeGroupQueue:
        assert isinstance(self.ports.proxy, WholeGroupProxy)
        return self.ports.proxy.queue

    async def run(self, prompt: Prompt) -> TrajectoryGroup | Discard:
        """See `GroupRollout`."""
        hold = functools.partial(self._queue.hold, self.key, self.responses, self.key.prompt)
        try:
            await self._insist(WHOLE, hold)
            return await super().run(prompt)
        finally:
            self._queue.give_back(self.key)

    async def _closed(self, episode: PlayedEpisode) -> bool:
        if self.unanswered == 1:  # it is the last
            self._queue.give_back(self.key)
        return await super()._closed(episode)


class WholeGroupScheduler(RolloutScheduler):
    """A prompt holds slots of one engine until its slowest response ends."""

    def _rollout(self, issue: Issue) -> GroupRollout:
        return WholeGroupRollout(issue.key, self._group_ports, issue.responses, self._issued, awaited=issue.awaited)


class WholeGroupBatches(WholeGroupScheduler, BatchScheduler):
    """Both."""
