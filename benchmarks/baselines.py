"""Defines slower schedulers, with which rollflow's asynchronous scheduler is compared. No recipe can choose them.

- `BatchScheduler` generates one batch after another.
- `WholeGroupScheduler`, with `WholeGroupProxy`, generates all responses of a group on one engine.

`BatchRun` and `WholeGroupRun` are simulated runs with these schedulers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Discard, Prompt, TrajectoryGroup
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.rollout.cache_queue import CacheLimits
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.issue_order import Issue
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.rollout.slots import EngineSlots, SlotQueue, Ticket
from rollflow.tasks.simulation.world import SimulatedRun

WHOLE = -1  # stands for all samples of a group where a sample number is expected

# --- batch after batch ------------------------------------------------------------------------------------------


class BatchScheduler(RolloutScheduler):
    """A scheduler that starts the groups of a batch only after all earlier groups have ended.

    The responses of a batch are scored once the last response of the batch has ended.
    """

    _generated_all: asyncio.Event

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        if self._running:
            return
        self._generated_all = asyncio.Event()
        await super()._start_groups(tasks)

    @property
    def _slots(self) -> float:
        """No limit on slots, because requests may queue at the engines."""
        return math.inf

    async def _count_response(self, tokens: int) -> None:
        await super()._count_response(tokens)
        await self._generated_all.wait()

    def _free_requests(self, responses: int) -> None:
        super()._free_requests(responses)
        if self._generating == 0:
            self._generated_all.set()


# --- whole groups -----------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class GroupTicket(Ticket):
    """A ticket with which a request waits for `width` slots of one engine, or for one of the slots that its group
    already holds.
    """

    width: int = 1
    within: EngineSlots | None = None  # the engine on which the ticket's group holds slots


class WholeGroupQueue(SlotQueue):
    """A queue in which a group holds slots of one engine until the group releases the slots.

    The requests of a group run in the group's slots. If the engine dies, the requests continue on other engines, one by
    one.
    """

    def __init__(self, slots: int, replacement_seconds: float) -> None:
        """Create the queue for engines with `slots` slots each."""
        super().__init__("least-work", replacement_seconds)
        self._slots = slots
        self._held: dict[Hashable, tuple[EngineSlots, GroupTicket]] = {}

    async def hold(self, group: Hashable, width: int, priority: float) -> None:
        """Wait until the group holds `width` slots of one engine, or all slots of an engine with fewer slots.

        Raises:
            EngineFailed: no engine lives, and no engine has joined in time.
        """
        ticket = self.create_ticket(priority, width=min(width, self._slots))
        lane = await self.take(ticket)
        assert lane is not None, "the queue withdraws no ticket of a group"
        self._held[group] = lane, ticket

    def release_group(self, group: Hashable) -> None:
        """Free the slots of a group; a second call for the same group changes nothing."""
        if held := self._held.pop(group, None):
            self.release(*held)

    def create_ticket(self, priority: float, group: Hashable = None, width: int = 1) -> GroupTicket:
        """Create a ticket that comes after all other tickets of this priority."""
        within, _ = self._held.get(group, (None, None))
        return GroupTicket(*super().create_ticket(priority).turn, width=width, within=within)

    async def take(self, ticket: Ticket) -> EngineSlots | None:
        """Wait for a slot as `SlotQueue` does; a ticket gets a slot immediately if its group holds slots."""
        assert isinstance(ticket, GroupTicket)
        if ticket.within is not None and ticket.within.failure is None:
            return ticket.within
        ticket.within = None
        try:
            return await super().take(ticket)
        except asyncio.CancelledError:
            self._dispatch()  # later tickets that need fewer slots may get them now
            raise

    def release(self, lane: EngineSlots, ticket: Ticket) -> None:
        """Free the ticket's slots; a slot that the ticket's group holds stays taken."""
        assert isinstance(ticket, GroupTicket)
        if lane is not ticket.within:
            lane.taken -= ticket.width - 1
            super().release(lane, ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a waiting ticket. Later tickets that need fewer slots may then get them."""
        super().withdraw(ticket)
        self._dispatch()

    def _grant(self, ticket: Ticket, lane: EngineSlots) -> None:
        assert isinstance(ticket, GroupTicket)
        lane.taken += ticket.width - 1
        super()._grant(ticket, lane)

    def _choose(self, ticket: Ticket) -> EngineSlots | None:
        assert isinstance(ticket, GroupTicket)
        if ticket.width == 1:
            return super()._choose(ticket)
        widest = max(self.live, key=lambda lane: lane.free, default=None)
        return widest if widest is not None and widest.free >= ticket.width else None


class WholeGroupProxy(InferenceProxy):
    """A proxy for requests that come in whole groups."""

    _queue: WholeGroupQueue

    def __init__(
        self,
        engines: Sequence[Engine],
        slots: int,
        replacement_seconds: float = 0.0,
        routing: Routing = "least-work",
        cache: CacheLimits | None = None,
    ) -> None:
        super().__init__([], slots, replacement_seconds, routing)
        self._queue = WholeGroupQueue(slots, replacement_seconds)
        for place, engine in enumerate(engines):
            self._queue.put(place, EngineSlots(engine, slots))

    @property
    def queue(self) -> WholeGroupQueue:
        """The queue in which groups get their slots."""
        return self._queue


class WholeGroupRollout(GroupRollout):
    """A group of requests that waits until it has slots for all of its requests, and holds these slots until its last
    response ends.
    """

    @property
    def _queue(self) -> WholeGroupQueue:
        assert isinstance(self.ports.proxy, WholeGroupProxy)
        return self.ports.proxy.queue

    async def run(self, prompt: Prompt) -> TrajectoryGroup | Discard:
        """Run the group as `GroupRollout` does, while the group holds its slots."""
        try:
            await self._hold_slots()
            return await super().run(prompt)
        finally:
            self._queue.release_group(self.key)

    async def _hold_slots(self) -> None:
        """Wait for slots for all requests, unless the dispatch is given up first."""
        while self._reason is None:
            try:
                await self._queue.hold(self.key, self.responses, self.key.prompt)
                return
            except EngineFailed:
                self._count_failure(WHOLE)

    async def _close_episode(self, episode: PlayedEpisode) -> bool:
        if self.unanswered == 1:  # this episode is the group's last one
            self._queue.release_group(self.key)
        return await super()._close_episode(episode)


class WholeGroupScheduler(RolloutScheduler):
    """A scheduler that lets the responses to a prompt hold slots of one engine until the slowest response ends."""

    def _create_rollout(self, issue: Issue) -> GroupRollout:
        return WholeGroupRollout(issue.key, self._group_ports, issue.responses, self._issued, awaited=issue.awaited)


class BatchRun(SimulatedRun):
    """A simulated run that generates one batch after the other."""

    scheduler_type = BatchScheduler


class WholeGroupRun(SimulatedRun):
    """A simulated run that generates all responses of a group on one engine."""

    proxy_type = WholeGroupProxy
    scheduler_type = WholeGroupScheduler
