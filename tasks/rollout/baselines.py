"""Baselines that asynchronous rollout is measured against. The shipped classes do not depend on them.

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
from rollflow.tasks.rollout.admission import AdmissionInputs
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.issue_order import Issue
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.rollout.slots import EngineSlots, SlotQueue, Ticket

WHOLE = -1  # stands for all samples of a group where a sample number is expected

# --- batch after batch ------------------------------------------------------------------------------------------


class BatchScheduler(RolloutScheduler):
    """Starts the groups of a batch once all earlier groups have ended, and scores them once the last response of the
    batch has ended."""

    _generated_all: asyncio.Event

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        if self._running:
            return
        self._generated_all = asyncio.Event()
        super()._start_groups(tasks)

    def _read_supply(self) -> AdmissionInputs:
        """Read the state for admission; the number of slots is no limit, because requests may queue at the engines."""
        return replace(super()._read_supply(), slots=math.inf)

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
    """A ticket for `width` slots of one engine, or for one of the slots that its group holds."""

    width: int = 1
    within: EngineSlots | None = None  # the engine on which its group holds slots


class WholeGroupQueue(SlotQueue):
    """A queue in which a group holds slots of one engine until it releases them. Its requests run there; if the engine
    dies, they continue on other engines, one by one."""

    def __init__(self, slots: int, replacement_seconds: float) -> None:
        """Create the queue for engines with `slots` slots each."""
        super().__init__("least-work", replacement_seconds)
        self._slots = slots
        self._held: dict[Hashable, tuple[EngineSlots, GroupTicket]] = {}

    async def hold(self, group: Hashable, width: int, priority: float) -> None:
        """Wait until the group holds `width` slots of one engine, or all of its slots if it has fewer.

        Raises:
            EngineFailed: no engine lives, and none has joined in time.
        """
        ticket = self.create_ticket(priority, width=min(width, self._slots))
        lane = await self.take(ticket)
        assert lane is not None, "the queue withdraws no ticket of a group"
        self._held[group] = lane, ticket

    def release_group(self, group: Hashable) -> None:
        """Free the slots of a group; a second call changes nothing."""
        if held := self._held.pop(group, None):
            self.release(*held)

    def create_ticket(self, priority: float, group: Hashable = None, width: int = 1) -> GroupTicket:
        """Create a ticket behind all others of this priority."""
        within, _ = self._held.get(group, (None, None))
        return GroupTicket(super().create_ticket(priority).turn, width=width, within=within)

    async def take(self, ticket: Ticket) -> EngineSlots | None:
        """Wait for a slot as `SlotQueue` does; a ticket whose group holds slots gets one of them immediately."""
        assert isinstance(ticket, GroupTicket)
        if ticket.within is not None and ticket.within.failure is None:
            return ticket.within
        ticket.within = None
        try:
            return await super().take(ticket)
        except asyncio.CancelledError:
            self._dispatch()  # narrower tickets behind it may fit
            raise

    def release(self, lane: EngineSlots, ticket: Ticket) -> None:
        """Free the ticket's slots; a slot that its group holds stays taken."""
        assert isinstance(ticket, GroupTicket)
        if lane is not ticket.within:
            lane.taken -= ticket.width - 1
            super().release(lane, ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a waiting ticket; narrower tickets behind it may fit then."""
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
    """A proxy whose requests come in whole groups."""

    _queue: WholeGroupQueue

    def __init__(self, engines: Sequence[Engine], slots: int, replacement_seconds: float = 0.0) -> None:
        super().__init__([], slots, replacement_seconds)
        self._queue = WholeGroupQueue(slots, replacement_seconds)
        for place, engine in enumerate(engines):
            self._queue.put(place, EngineSlots(engine, slots))

    @property
    def queue(self) -> WholeGroupQueue:
        """The queue in which groups get their slots."""
        return self._queue


class WholeGroupRollout(GroupRollout):
    """A dispatch that waits for slots for all of its requests, and holds them until its last response ends."""

    @property
    def _queue(self) -> WholeGroupQueue:
        assert isinstance(self.ports.proxy, WholeGroupProxy)
        return self.ports.proxy.queue

    async def run(self, prompt: Prompt) -> TrajectoryGroup | Discard:
        """Run the group as `GroupRollout` does, while it holds its slots."""
        hold = functools.partial(self._queue.hold, self.key, self.responses, self.key.prompt)
        try:
            await self._ask_until_answered(WHOLE, hold)
            return await super().run(prompt)
        finally:
            self._queue.release_group(self.key)

    async def _close_episode(self, episode: PlayedEpisode) -> bool:
        if self.unanswered == 1:  # this episode is the last one
            self._queue.release_group(self.key)
        return await super()._close_episode(episode)


class WholeGroupScheduler(RolloutScheduler):
    """Lets a prompt hold slots of one engine until its slowest response ends."""

    def _create_rollout(self, issue: Issue) -> GroupRollout:
        return WholeGroupRollout(issue.key, self._group_ports, issue.responses, self._issued, awaited=issue.awaited)


class WholeGroupBatches(WholeGroupScheduler, BatchScheduler):
    """Combines both baselines."""
