"""Defines the channel, which passes committed batches to the learner and announces new policy versions to the
scheduler.

The channel caches committed batches, which are also in the trajectory store. The channel contains at most `capacity`
batches that the learner has not acknowledged; if the channel is full, `put` waits until a deadline. The learner leases
batch b only while policy version b is the newest, and trains version b + 1 on this batch. If several log entries have
committed a batch of the same number, a lease returns the batch of the newest entry. A voided (revoked) batch is never
returned. The methods `put`, `ack` and `announce` are idempotent, because Ray may repeat a call. A batch that is not in
the channel is read from the trajectory store, so no batch is lost if the channel's process dies.

    scheduler --put--> [ b | b+1 | b+2 ] --lease--> learner
    scheduler <--wait_version-- newest version <--ack, announce-- learner

This module is plain asyncio; `tasks/actors/channel.py` wraps it in an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollflow.storage.errors import Missing

Payload = TypeVar("Payload")
Refilled = TypeVar("Refilled", covariant=True)

LOOK_SECONDS = 1.0  # longest time that a lease waits for a `put` before the lease reads the store again


class Source(Protocol[Refilled]):
    """The interface of the trajectory store that the channel uses to read batches."""

    async def entry(self, number: int) -> int | None:
        """Return the log entry that committed batch `number`; return None if no batch of this number waits for
        training."""

    async def read(self, number: int) -> Refilled:
        """Read the content of batch `number` from storage; raise `Missing` or `Corrupt` if this is not possible."""


class Channel(Generic[Payload]):
    """A bounded cache of committed batches between the scheduler and the learner."""

    def __init__(self, capacity: int, source: Source[Payload], version: int = -1) -> None:
        self.capacity = capacity
        self.version = version  # newest announced policy version
        self._source = source
        self._batches: dict[int, tuple[int, Payload]] = {}  # batch number -> (number of the log entry, payload)
        self._done = max(version, 0)  # all batches with smaller numbers were already trained on
        self._changed = asyncio.Condition()

    @property
    def waiting(self) -> int:
        """The number of batches in the channel that are not acknowledged yet."""
        return len(self._batches)

    async def put(self, number: int, payload: Payload, deadline: float, entry: int = 0) -> None:
        """Add batch `number`, which log entry `entry` committed. A repeated call of `put`, or a call with an older log
        entry, changes nothing.

        Raises:
            TimeoutError: the channel stayed full for `deadline` seconds.
        """
        async with self._changed:
            await self._until(lambda: number < self._done + self.capacity, deadline, f"room for batch {number}")
            if number >= self._done and entry > self._held_entry(number):
                self._batches[number] = (entry, payload)
                self._changed.notify_all()

    async def lease(self, number: int, deadline: float, *, afresh: bool = False) -> Payload:
        """Return batch `number` from the channel or the trajectory store; the batch stays in the channel until it is
        acknowledged.

        Args:
            afresh: if true, drop the cached copy of the batch, and read the batch from the store.

        Raises:
            TimeoutError: the batch was not committed within `deadline` seconds.
            Corrupt: the bytes of the batch differ from the committed bytes.
        """
        if afresh:
            self._batches.pop(number, None)
        left = deadline
        while (held := await self._refresh_batch(number)) is None:
            if left <= 0:
                raise TimeoutError(f"batch {number} did not come from the rollout stage within {deadline:g} s")
            look = min(LOOK_SECONDS, left)
            left -= look
            with contextlib.suppress(TimeoutError):
                async with self._changed:
                    await self._until(lambda: number in self._batches, look, "a put")
        return held[1]

    async def _refresh_batch(self, number: int) -> tuple[int, Payload] | None:
        """Update the cached batch `number` from the store; return the batch's log entry and payload, or None if no such
        batch waits for training.
        """
        before = self._batches.get(number)
        entry = await self._source.entry(number)
        if entry is None:
            if before is not None and self._batches.get(number) is before:
                del self._batches[number]
            return None
        if self._held_entry(number) < entry:
            try:
                payload = await self._source.read(number)
            except Missing:  # the batch was voided after its log entry was read
                return None
            if self._held_entry(number) < entry:
                self._batches[number] = (entry, payload)
        return self._batches[number]

    def _held_entry(self, number: int) -> int:
        """Return the number of the log entry that committed the cached batch `number`; return -1 if the batch is not
        cached."""
        return self._batches[number][0] if number in self._batches else -1

    async def ack(self, number: int) -> None:
        """Acknowledge that batch `number` was trained on, and drop this batch and all earlier batches."""
        async with self._changed:
            self._done = max(self._done, number + 1)
            for old in [n for n in self._batches if n < self._done]:
                del self._batches[old]
            self._changed.notify_all()

    async def announce(self, version: int) -> None:
        """Announce to waiting callers that policy version `version` is published."""
        async with self._changed:
            self.version = max(self.version, version)
            self._changed.notify_all()

    async def wait_version(self, after: int, deadline: float) -> int:
        """Wait up to `deadline` seconds for a policy version newer than `after`; return the newest announced
        version."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: self.version > after, deadline, "a policy version")
            return self.version

    async def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait up to `deadline` seconds until `condition` is true; the condition is checked under the lock."""
        if condition():
            return
        try:
            await asyncio.wait_for(self._changed.wait_for(condition), deadline)
        except TimeoutError:
            raise TimeoutError(f"waited for {what} in vain, for {deadline:g} s") from None
