"""Builds a slot queue (which assigns requests to engines) with idle engines, for examples that were computed by
hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.slots import EngineSlots, SlotQueue, Ticket
from rollflow.tasks.runtime.clock import run_virtual

PATIENCE = 5.0


def lane(slots: int, *, serves: bool = True) -> EngineSlots:
    """Create the lane (the slots) of an engine. `serves` says whether the engine takes requests."""
    made = EngineSlots(TimedEngine(TimedEngineConfig()), slots)
    if serves:
        made.serves.set()
    return made


def queue_of(*lanes: EngineSlots, routing: Routing = "least-work") -> SlotQueue:
    """Create a queue with these lanes, each at its given index."""
    queue = SlotQueue(routing, PATIENCE)
    for place, one in enumerate(lanes):
        queue.put(place, one)
    return queue


async def taken(queue: SlotQueue, count: int = 1, group: object = None) -> list[tuple[EngineSlots, Ticket]]:
    """Take this many slots, one after another; return the lane of each."""
    found = []
    for _ in range(count):
        ticket = queue.create_ticket(0, group)
        went = await queue.take(ticket)
        assert went is not None
        found.append((went, ticket))
    return found


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine on the virtual clock, for at most 100 seconds."""

    async def bounded() -> None:
        async with asyncio.timeout(100):
            await main()

    run_virtual(bounded())
