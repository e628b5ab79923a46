"""The channel: committed batches on their way to the learner, and the news of published versions on the way back.

It is a cache of the trajectory store and holds nothing that is not committed there:

- Bounded: at most `capacity` batches that nobody acknowledged; `put` waits for room, with a deadline.
- Version-aware: batch b is handed out only as the batch that trains version b; acknowledging b drops all up to b.
- Lease and acknowledge: a leased batch stays until it is acknowledged, so a learner that died gets it again.
- Idempotent: `put`, `ack` and `announce` may be repeated (Ray's retries are at-least-once).
- Losing it costs a refill: a batch it does not hold is read from the store.

    scheduler --put--> [ b | b+1 | b+2 ] --lease--> learner
    scheduler <--wait_version-- newest version <--ack, announce-- learner

This is plain asyncio; `ray_channel` puts it into an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Payload = TypeVar("Payload")


class BatchChannel(Protocol):
    """What the scheduler and the learner see of the channel, wherever it lives. Payloads are Arrow file bytes."""

    async def put(self, number: int, payload: object, deadline: float) -> None:
        """Hand over committed batch `number`; waits for room, `TimeoutError` after `deadline` seconds."""

    async def wait_version(self, after: int, deadline: float) -> int:
        """The newest announced version once it is above `after`; what is known after `deadline` seconds."""


class Channel(Generic[Payload]):
    """The channel's state and its waits. See the module's docstring for the guarantees."""

    def __init__(self, capacity: int, refill: Callable[[int], Payload | None], version: int = -1) -> None:
        self.capacity = capacity
        self.version = version  # newest announced policy version
        self._refill = refill
        self._batches: dict[int, Payload] = {}
        self._done = 0  # every batch below this number was acknowledged
        self._changed = asyncio.Condition()

    @property
    def waiting(self) -> int:
        """Batches held and not acknowledged."""
        return len(self._batches)

    async def put(self, number: int, payload: Payload, deadline: float) -> None:
        """Hand over committed batch `number`.

        Raises:
            TimeoutError: no room came free within `deadline` seconds.
        """
        async with self._changed:
            await self._until(lambda: number < self._done + self.capacity, deadline, f"room for batch {number}")
            if number >= self._done and number not in self._batches:
                self._batches[number] = payload
                self._changed.notify_all()

    async def lease(self, number: int, deadline: float) -> Payload:
        """Batch `number`, from the cache or the store; held until it is acknowledged.

        Raises:
            TimeoutError: it was not committed within `deadline` seconds.
            Corrupt: it was committed, and its bytes are not what they were.
        """
        if number not in self._batches:
            refilled = await asyncio.to_thread(self._refill, number)
            if refilled is not None:
                self._batches.setdefault(number, refilled)
        async with self._changed:
            await self._until(lambda: number in self._batches, deadline, f"batch {number} from the rollout stage")
            return self._batches[number]

    async def ack(self, number: int) -> None:
        """Batch `number` was trained on: drop it and all before it."""
        async with self._changed:
            self._done = max(self._done, number + 1)
            for old in [n for n in self._batches if n < self._done]:
                del self._batches[old]
            self._changed.notify_all()

    async def announce(self, version: int) -> None:
        """Policy `version` is published."""
        async with self._changed:
            self.version = max(self.version, version)
            self._changed.notify_all()

    async def wait_version(self, after: int, deadline: float) -> int:
        """The newest announced version once it is above `after`; what is known after `deadline` seconds."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: self.version > after, deadline, "a policy version")
            return self.version

    async def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait for `condition` under the lock, at most `deadline` seconds."""
        try:
            await asyncio.wait_for(self._changed.wait_for(condition), deadline)
        except TimeoutError:
            raise TimeoutError(f"waited {deadline:g} s for {what}") from None
