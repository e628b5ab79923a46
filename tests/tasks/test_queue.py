"""When a request gets its slot, and when it is told that there is none: by hand. `test_slots` attacks the same."""

from __future__ import annotations

import asyncio

import pytest

from rollflow.storage.errors import EngineFailed
from tests.support.lanes import PATIENCE, lane, queue_of, taken, virtual


def test_the_lowest_priority_number_goes_first_and_then_the_earliest() -> None:
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

        waiting = [asyncio.create_task(wait(name)) for name in "cadb"]  # a ticket's turn is when it was made
        await asyncio.sleep(0)
        assert queue.waiting == 4
        queue.release(only, holding)
        await asyncio.gather(*waiting)
        assert order == ["b", "d", "a", "c"]
        assert (queue.waiting, only.taken) == (0, 0)

    virtual(main)


def test_what_was_withdrawn_gets_nothing_and_costs_nobody_a_slot() -> None:
    async def main() -> None:
        only = lane(1)
        queue = queue_of(only)
        [(_, holding)] = await taken(queue)
        gone, stays = queue.create_ticket(0), queue.create_ticket(0)
        assert not gone.waits
        queue.withdraw(gone)  # it stands nowhere yet
        both = [asyncio.create_task(queue.take(ticket)) for ticket in (gone, stays)]
        await asyncio.sleep(0)
        assert gone.waits
        queue.withdraw(gone)
        assert await both[0] is None
        assert not gone.waits
        queue.withdraw(gone)  # a second time changes nothing
        queue.release(only, holding)
        assert await both[1] is only
        queue.withdraw(stays)  # it has its slot
        assert (only.taken, queue.waiting, stays.lane) == (1, 0, only)

    virtual(main)


def test_who_was_granted_a_slot_and_is_cancelled_gives_it_back() -> None:
    async def main() -> None:
        only = lane(1)
        queue = queue_of(only)
        [(_, holding)] = await taken(queue)
        first, second = (asyncio.create_task(queue.take(queue.create_ticket(0))) for _ in range(2))
        await asyncio.sleep(0)
        queue.release(only, holding)
        first.cancel()  # granted, and it does not know yet
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second is only
        assert only.taken == 1

    virtual(main)


def test_entries_that_newer_ones_replaced_do_not_pile_up() -> None:
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


def test_while_no_engine_lives_requests_wait_and_then_fail_with_the_reasons() -> None:
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
            with pytest.raises(EngineFailed, match=r"^no engine is left: out of memory; hung$"):
                await one
        assert clock() - began == PATIENCE  # from when the first of them waited
        assert queue.waiting == 0
        with pytest.raises(EngineFailed):
            await queue.take(queue.create_ticket(0))
        assert clock() - began == 2 * PATIENCE
        assert str(queue_of().build_no_engine_error()) == "no engine is left: none has started"

    virtual(main)


def test_of_those_that_wait_in_vain_the_withdrawn_are_told_nothing() -> None:
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


def test_the_wait_is_that_of_the_request_not_of_the_engines() -> None:
    """They died while nobody asked."""

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


def test_an_engine_that_joins_ends_the_wait() -> None:
    """One that is not ready yet, too: what waits is told of no end, however long it takes."""

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


def test_the_wait_begins_again_when_the_last_engine_dies_again() -> None:
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


def test_an_engine_that_was_taken_out_of_its_place_is_no_reason() -> None:
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
