"""The channel: bounded, leased, idempotent, refilled from the store; the same in a Ray actor."""

from __future__ import annotations

import asyncio

import pytest

from rollflow.storage.channel import Channel
from rollflow.tasks.clock import run_virtual


def channel(capacity: int = 2, stored: dict[int, str] | None = None) -> Channel[str]:
    return Channel(capacity, (stored or {}).get)


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(function, *arguments):  # type: ignore[no-untyped-def]
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)


@pytest.fixture(autouse=True)
def _virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)


def test_put_waits_for_room_and_no_longer_than_asked() -> None:
    async def main() -> None:
        made = channel(capacity=2)
        await made.put(0, "a", 1)
        await made.put(1, "b", 1)
        with pytest.raises(TimeoutError, match="waited 5 s for room for batch 2"):
            await made.put(2, "c", 5)
        waiting = asyncio.create_task(made.put(2, "c", 100))
        await asyncio.sleep(1)
        await made.ack(0)
        await waiting
        assert made.waiting == 2

    run_virtual(main())


def test_a_leased_batch_stays_until_it_is_acknowledged() -> None:
    async def main() -> None:
        made = channel()
        await made.put(0, "a", 1)
        assert [await made.lease(0, 1) for _ in range(3)] == ["a", "a", "a"]
        await made.ack(0)
        with pytest.raises(TimeoutError, match="waited 2 s for batch 0"):
            await made.lease(0, 2)

    run_virtual(main())


def test_repeated_calls_change_nothing() -> None:
    async def main() -> None:
        made = channel()
        await made.put(0, "a", 1)
        await made.put(0, "another", 1)
        assert await made.lease(0, 1) == "a"
        await made.ack(0)
        await made.ack(0)
        await made.put(0, "late", 1)  # acknowledged already: a retry must not bring it back
        assert made.waiting == 0
        await made.announce(4)
        await made.announce(3)
        assert made.version == 4

    run_virtual(main())


def test_a_lost_channel_is_refilled_from_the_store() -> None:
    async def main() -> None:
        made = channel(stored={3: "stored"})
        assert await made.lease(3, 1) == "stored"

    run_virtual(main())


def test_news_of_a_version_ends_the_wait() -> None:
    async def main() -> None:
        made = channel()
        waiting = asyncio.create_task(made.wait_version(0, 60))
        await asyncio.sleep(5)
        await made.announce(1)
        assert await waiting == 1
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert await made.wait_version(1, 7) == 1  # nothing new: what is known
        assert asyncio.get_running_loop().time() == pytest.approx(12)

    run_virtual(main())
