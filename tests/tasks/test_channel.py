"""Tests of the channel of batches: it is bounded, keeps unacknowledged batches, is refilled from the store, ignores
repeated calls, and never returns a voided batch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from rollflow.storage.channel import Channel
from rollflow.storage.errors import Corrupt, Missing
from rollflow.tasks.runtime.clock import run_virtual


@dataclass
class Stored:
    """A `Source` that reads batches from a table: batch number -> log entry, payload."""

    batches: dict[int, tuple[int, str]] = field(default_factory=dict)
    reads: int = 0

    async def entry(self, number: int) -> int | None:
        return self.batches[number][0] if number in self.batches else None

    async def read(self, number: int) -> str:
        self.reads += 1
        if number not in self.batches:
            raise Missing("voided")
        if "corrupt" in self.batches[number][1]:
            raise Corrupt("rotten")
        return self.batches[number][1]


def channel(capacity: int = 2, *batches: str, version: int = -1) -> Channel[str]:
    return Channel(capacity, Stored({n: (0, payload) for n, payload in enumerate(batches)}), version)


def test_channel_put_waits_for_room_until_its_deadline() -> None:
    async def main() -> None:
        made = channel(capacity=2)
        await made.put(0, "a", 1)
        await made.put(1, "b", 1)
        with pytest.raises(TimeoutError, match="waited for room for batch 2 in vain, for 5 s"):
            await made.put(2, "c", 5)
        waiting = asyncio.create_task(made.put(2, "c", 100))
        await asyncio.sleep(1)
        await made.ack(0)
        await waiting
        assert made.waiting == 2

    run_virtual(main())


def test_channel_keeps_a_batch_until_it_is_acknowledged() -> None:
    async def main() -> None:
        made = channel(2, "stored")
        await made.put(0, "a", 1)
        assert [await made.lease(0, 1) for _ in range(3)] == ["a", "a", "a"]
        await made.ack(0)
        assert made.waiting == 0
        with pytest.raises(TimeoutError, match=r"batch 1 did not come from the rollout stage within 2\.5 s"):
            await made.lease(1, 2.5)
        assert asyncio.get_running_loop().time() == 2.5

    run_virtual(main())


def test_repeated_channel_calls_have_no_effect() -> None:
    async def main() -> None:
        made = channel(2, "stored")
        await made.put(0, "a", 1)
        await made.put(0, "another", 1)
        assert await made.lease(0, 1) == "a"
        await made.ack(0)
        await made.ack(0)
        await made.put(0, "late", 1)  # acknowledged already: a retry must not put it back
        assert made.waiting == 0
        await made.announce(4)
        await made.announce(3)
        assert made.version == 4

    run_virtual(main())


def test_lost_channel_is_refilled_from_the_store() -> None:
    async def main() -> None:
        made = channel(2, "zero", "one", "two", "three", version=3)
        assert await made.lease(3, 1) == "three"
        await made.put(4, "four", 1)  # a batch trained before the channel started takes no room
        await made.put(2, "two", 1)
        assert made.waiting == 2

    run_virtual(main())


def test_batch_whose_channel_put_was_lost_is_read_from_the_store() -> None:
    """The scheduler died between its commit and its put, while the learner waited."""

    async def main() -> None:
        stored = Stored()
        made = Channel(2, stored)
        waiting = asyncio.create_task(made.lease(0, 60))
        await asyncio.sleep(5.5)
        stored.batches[0] = (0, "a")
        assert await waiting == "a"
        assert asyncio.get_running_loop().time() == 6

    run_virtual(main())


def test_channel_never_returns_a_voided_batch() -> None:
    async def main() -> None:
        stored = Stored({0: (0, "a")})
        made = Channel(2, stored)
        await made.put(0, "a", 1)
        assert await made.lease(0, 1) == "a"
        del stored.batches[0]
        with pytest.raises(TimeoutError):
            await made.lease(0, 1)
        await made.put(0, "a", 1)  # repeated by a scheduler that does not know that its first put succeeded
        waiting = asyncio.create_task(made.lease(0, 60))
        await asyncio.sleep(5)
        stored.batches[0] = (1, "b")
        await made.put(0, "b", 1, entry=1)
        await made.put(0, "a", 1)
        assert await waiting == "b"
        assert (made.waiting, stored.reads) == (1, 0)
        stored.batches[0] = (2, "c")  # committed, but not put into the channel
        assert await made.lease(0, 1) == "c"

    run_virtual(main())


def test_corrupt_batch_in_the_store_is_reported() -> None:
    async def main() -> None:
        stored = Stored({0: (0, "corrupt")})
        made = Channel(2, stored)
        with pytest.raises(Corrupt):
            await made.lease(0, 1)
        stored.batches[0] = (1, "good")
        assert await made.lease(0, 1) == "good"

    run_virtual(main())


def test_damaged_copy_of_a_batch_is_read_again() -> None:
    async def main() -> None:
        made = channel(2, "good")
        await made.put(0, "damaged in memory", 1)
        assert await made.lease(0, 1) == "damaged in memory"
        assert await made.lease(0, 1, afresh=True) == "good"
        assert await made.lease(0, 1) == "good"

    run_virtual(main())


def test_announced_policy_version_ends_the_wait_for_it() -> None:
    async def main() -> None:
        made = channel()
        waiting = asyncio.create_task(made.wait_version(0, 60))
        await asyncio.sleep(5)
        await made.announce(1)
        assert await waiting == 1
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert await made.wait_version(1, 7) == 1  # no newer version: the known version is returned
        assert asyncio.get_running_loop().time() == pytest.approx(12)

    run_virtual(main())
