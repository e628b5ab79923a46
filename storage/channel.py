"""The channel: committed batches on their way to the learner, and the news of published versions on the way back.

It is a cache of the trajectory store and holds nothing that is not committed in the run's log:

- Bounded: at most `capacity` batches that nobody acknowledged; `put` waits for room, with a deadline.
- Version-aware: batch b is handed out only as the batch that trains version b; acknowledging b drops all up to b.
- Entry-aware: it hands out what the log's newest entry of that batch committed, never a batch that was voided.
- Lease and acknowledge: a leased batch stays until it is acknowledged, so a learner that died gets it again.
- Idempotent: `put`, `ack` and `announce` may be repeated (Ray's retries are at-least-once).
- Losing it costs a refill: a batch it does not hold is read from the store.

    scheduler --put--> [ b | b+1 | b+2 ] --lease--> learner
    scheduler <--wait_version-- newest version <--ack, announce-- learner

This is plain asyncio; `tasks/actors/channel.py` puts it into an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollflow.storage.errors import Missing

Payload = TypeVar("Payload")
Refilled = TypeVar("Refilled", covariant=True)

LOOK_SECONDS = 1.0  # how long a lease waits for a `put` before it looks into the store again


class Source(Protocol[Refilled]):
    """The trajectory store, as the channel sees it."""

    async def entry(self, number: int) -> int | None:
        """The entry of the log that committed batch `number`; None if no such batch waits to be trained on."""

    async def read(self, number: int) -> Refilled:
        """Its payload; `Missing` or `Corrupt`."""


class Channel(Generic[Payload]):
    """What the channel holds, and its waits. See the module's docstring for the guarantees."""

    def __init__(self, capacity: int, source: Source[Payload], version: int = -1) -> None:
        self.capacity = capacity
        self.version = version  # newest announced policy version
        self._source = source
        self._batches: dict[int, tuple[int, Payload]] = {}  # number -> entry, payload
        self._done = max(version, 0)  # every batch below this number was trained on
        self._changed = asyncio.Condition()

    @property
    def waiting(self) -> int:
        """Batches held and not acknowledged."""
        return len(self._batches)

    async def put(self, number: int, payload: Payload, deadline: float, entry: int = 0) -> None:
        """Hand over batch `number` as `entry` committed it; an older one or a repeated call changes nothing.

        Raises:
            TimeoutError: no room came free within `deadline` seconds.
        """
        async with self._changed:
            await self._until(lambda: number < self._done + self.capacity, deadline, f"room for batch {number}")
            if number >= self._done and entry > self._held(number):
                self._batches[number] = (entry, payload)
                self._changed.notify_all()

    async def lease(self, number: int, deadline: float, *, afresh: bool = False) -> Payload:
        """Batch `number`, from the cache or the store; held until it is acknowledged.

        Args:
            afresh: forget what is held and read it from the store.

        Raises:
            TimeoutError: it was not committed within `deadline` seconds.
            Corrupt: it was committed, and its bytes are not what they were.
        """
        if afresh:
            self._batches.pop(number, None)
        left = deadline
        while (held := await self._refreshed(number)) is None:
            if left <= 0:
                raise TimeoutError(f"waited {deadline:g} s for batch {number} from the rollout stage")
            look = min(LOOK_SECONDS, left)
            left -= look
            with contextlib.suppress(TimeoutError):
                async with self._changed:
                    await self._until(lambda: number in self._batches, look, "a put")
        return held[1]

    async def _refreshed(self, number: int) -> tuple[int, Payload] | None:
        """Compare the cache with the store; returns what the cache then holds of batch `number`."""
        before = self._batches.get(number)
        entry = await self._source.entry(number)
        if entry is None:
            if before is not None and self._batches.get(number) is before:
                del self._batches[number]
            return None
        if self._held(number) < entry:
            try:
                payload = await self._source.read(number)
            except Missing:  # it was voided a moment ago
                return None
            if self._held(number) < entry:
                self._batches[number] = (entry, payload)
        return self._batches[number]

    def _held(self, number: int) -> int:
        """The entry of batch `number` that is held, or -1."""
        return self._batches[number][0] if number in self._batches else -1

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
        """Wait for a version above `after`, at most `deadline` seconds; returns the newest that was announced."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: self.version > after, deadline, "a policy version")
            return self.version

    async def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait for `condition` under the lock, at most `deadline` seconds."""
        if condition():
            return
        try:
            await asyncio.wait_for(self._changed.wait_for(condition), deadline)
        except TimeoutError:
            raise TimeoutError(f"waited {deadline:g} s for {what}") from None
