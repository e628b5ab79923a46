"""The slot queue, worked by hand: when a request gets a slot or an error. `test_slots` tests the same at random."""

from __future__ import annotations

import asyncio

import pytest

from rollflow.storage.errors import EngineFailed
from tests.support.lanes import PATIENCE, lane, queue_of, taken, virtual


def test_lowest_priority_then_earliest_goes_first() -> None:
    async def main() -> None:
        only = lane(1)
        queue = queue_of(only)
        [(_, holding)] = await taken(queue)
        tickets = {name: queue.create_ticket(priority) for name, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 1))}
        order: list[str] = []

        async def wait(name: str) -> None:
            assert await queue.take(tickets[name]) is only
            order.append(name)
            queue.release(only, tickets[name])

        waiting = [asyncio.create_task(wait(name)) for name in "cadb"]  # order of arrival is that of the tickets
        await asyncio.sleep(0)
        assert queue.waiting == 4
        queue.release(only, holding)
        await asyncio.gather(*waiting)
        assert order == ["b", "d", "a", "c"]
        assert (queue.waiting, only.taken) == (0, 0)

    virtual(main)


def test_withdrawn_ticket_takes_no_slot() -> None:
    async def main() -> None:
        only = lane(1)
        queue = queue_of(only)
        [(_, holding)] = await taken(queue)
        gone, stays = queue.create_ticket(0), queue.create_ticket(0)
        assert not gone.waits
        queue.withdraw(gone)  # it is not in the queue yet
        both = [asyncio.create_task(queue.take(ticket)) for ticket in (gone, stays)]
        await asyncio.sleep(0)
        assert gone.waits
        queue.withdraw(gone)
        assert await both[0] is None
        assert not gone.waits
        queue.withdraw(gone)  # a second call changes nothing
        queue.release(only, holding)
        assert await both[1] is only
        queue.withdraw(stays)  # it has a slot already
        assert (only.taken, queue.waiting, stays.lane) == (1, 0, only)

    virtual(main)


def test_cancelled_holder_frees_its_slot() -> None:
    async def main() -> None:
        only = lane(1)
        queue = queue_of(only)
        [(_, holding)] = await taken(queue)
        first, second = (asyncio.create_task(queue.take(queue.create_ticket(0))) for _ in range(2))
        await asyncio.sleep(0)
        queue.release(only, holding)
        first.cancel()  # its slot is granted, but its task has not run yet
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second is only
        assert only.taken == 1

    virtual(main)


def test_outdated_heap_entries_are_removed() -> None:
    async def main() -> None:
        lanes = [lane(4) for _ in range(3)]
        queue = queue_of(*lanes)
        for _ in range(1000):
            queue.offer_slots(lanes[0])
            assert len(queue._open) <= 4 * len(lanes) + 64
        assert {id(one) for _, stamp, one in queue._open if stamp == one.stamp} == set(map(id, lanes))
        await taken(queue, 12)
        assert [one.taken for one in lanes] == [4, 4, 4]

    virtual(main)


# --- no engine ---------------------------------------------------------------------------------------------


def test_requests_without_engines_fail_with_the_reasons() -> None:
    async def main() -> None:
        dead, other = lane(1), lane(1)
        queue = queue_of(dead, other)
        dead.failure, other.failure = EngineFailed("out of memory"), EngineFailed("hung")
        clock = asyncio.get_running_loop().time
        began = clock()
        waiting = [asyncio.create_task(queue.take(queue.create_ticket(0))) for _ in range(2)]
        await asyncio.sleep(3.0)
        late = asyncio.create_task(queue.take(queue.create_ticket(0)))
        for one in (*waiting, late):
            with pytest.raises(EngineFailed, match=r"^no engine is left to run requests: out of memory; hung$"):
                await one
        assert clock() - began == PATIENCE  # counted from the first waiting request
        assert queue.waiting == 0
        with pytest.raises(EngineFailed):
            await queue.take(queue.create_ticket(0))
        assert clock() - began == 2 * PATIENCE
        assert str(queue_of().build_no_engine_error()) == "no engine is left to run requests: no engine has started"

    virtual(main)


def test_withdrawn_ticket_gets_no_error() -> None:
    async def main() -> None:
        queue = queue_of()
        gone, stays = queue.create_ticket(0), queue.create_ticket(0)
        both = [asyncio.create_task(queue.take(ticket)) for ticket in (gone, stays)]
        await asyncio.sleep(1.0)
        queue.withdraw(gone)
        assert await both[0] is None
        with pytest.raises(EngineFailed):
            await both[1]

    virtual(main)


def test_wait_counts_from_the_request() -> None:
    """The engines died while there was no request."""

    async def main() -> None:
        only = lane(1)
        queue, clock = queue_of(only), asyncio.get_running_loop().time
        only.failure = EngineFailed("died")
        queue.offer_slots(only)
        await asyncio.sleep(PATIENCE - 1)
        with pytest.raises(EngineFailed):
            await queue.take(queue.create_ticket(0))
        assert clock() == 2 * PATIENCE - 1

    virtual(main)


def test_joining_engine_ends_the_wait() -> None:
    """Even an engine that does not serve yet ends the wait, however long it takes to get ready."""

    async def main() -> None:
        queue = queue_of()
        waiting = asyncio.create_task(queue.take(queue.create_ticket(0)))
        await asyncio.sleep(PATIENCE - 1)
        joined = lane(1, serves=False)
        assert queue.put(0, joined) is None
        await asyncio.sleep(5 * PATIENCE)
        assert not waiting.done()
        joined.serves.set()
        queue.offer_slots(joined)
        assert await waiting is joined
        again = lane(1)
        assert queue.put(0, again) is joined
        assert queue.live == [joined, again][1:]

    virtual(main)


def test_wait_restarts_when_the_last_engine_dies_again() -> None:
    async def main() -> None:
        queue, clock = queue_of(), asyncio.get_running_loop().time
        began = clock()
        waiting = asyncio.create_task(queue.take(queue.create_ticket(0)))
        await asyncio.sleep(PATIENCE - 1)
        joined = lane(1, serves=False)
        queue.put(0, joined)
        joined.failure = EngineFailed("died")
        queue.offer_slots(joined)
        with pytest.raises(EngineFailed, match="died"):
            await waiting
        assert clock() - began == 2 * PATIENCE - 1

    virtual(main)


def test_removed_engine_is_no_reason_for_failure() -> None:
    one, two = lane(1), lane(1)
    queue = queue_of(one, two)
    two.failure = EngineFailed("died")
    assert not queue.vacant
    assert queue.live == [one]
    two.failure = None
    queue.remove(one)
    assert queue.places == {1: two}
    assert not queue.vacant
    two.failure = EngineFailed("died")
    assert queue.vacant
    assert queue.live == []
