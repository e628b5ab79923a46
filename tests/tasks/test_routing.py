"""Which engine a request goes to, and when it is told that there is none: worked by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.clock import run_virtual
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.slots import Lane, SlotQueue, Ticket

PATIENCE = 5.0


def lane(slots: int, *, serves: bool = True) -> Lane:
    made = Lane(TimedEngine(TimedEngineConfig()), slots)
    if serves:
        made.serves.set()
    return made


def queue_of(*lanes: Lane, routing: Routing = "least-work") -> SlotQueue:
    queue = SlotQueue(routing, PATIENCE)
    for place, one in enumerate(lanes):
        queue.put(place, one)
    return queue


async def taken(queue: SlotQueue, count: int = 1, group: object = None) -> list[tuple[Lane, Ticket]]:
    """So many requests, one after the other, and where each went."""
    found = []
    for _ in range(count):
        ticket = queue.ticket(0, group)
        went = await queue.take(ticket)
        assert went is not None
        found.append((went, ticket))
    return found


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await main()

    run_virtual(bounded())


def test_engines_that_have_made_nothing_share_evenly() -> None:
    async def main() -> None:
        first, second = lane(4), lane(4)
        await taken(queue_of(first, second), 4)
        assert (first.taken, second.taken) == (2, 2)

    virtual(main)


def test_an_engine_of_three_times_the_pace_gets_three_times_the_requests() -> None:
    """A request more: 1 x 3 s against 1 x 1, 2 x 1, 3 x 1 s. At a tie it is the one that was offered first."""

    async def main() -> None:
        slow, fast = lane(8), lane(8)
        queue = queue_of(slow, fast)
        queue.observed(slow, 10, 30.0)
        queue.observed(fast, 20, 20.0)
        queue.changed(slow)
        queue.changed(fast)
        assert [one is fast for one, _ in await taken(queue, 8)] == [True, True, False, True, True, True, False, True]

    virtual(main)


def test_what_was_never_measured_has_the_pace_of_who_was_measured_first() -> None:
    async def main() -> None:
        measured, quicker, fresh = lane(9), lane(1), lane(9)
        queue = queue_of(measured, quicker, fresh)
        queue.observed(measured, 10, 20.0)
        queue.observed(quicker, 10, 1.0)
        queue.changed(measured)
        queue.changed(quicker)
        queue.changed(fresh)
        found = [one for one, _ in await taken(queue, 5)]
        assert found[0] is quicker
        assert sorted(map(id, found[1:])) == sorted(map(id, [measured, measured, fresh, fresh]))

    virtual(main)


def test_the_pace_is_what_was_measured_lately() -> None:
    one = lane(1)
    one.observe(10, 2.0)
    assert (one.tokens, one.seconds) == (10, 2.0)
    one.observe(20, 1.0)
    assert (one.tokens, one.seconds) == pytest.approx((11.0, 1.9))  # a tenth of the way
    one.observe(0, 0.0)
    assert (one.tokens, one.seconds) == pytest.approx((9.9, 1.71))


def test_a_response_without_tokens_measures_nothing() -> None:
    async def main() -> None:
        empty, full = lane(1), lane(1)
        queue = queue_of(empty, full)
        queue.observed(empty, 0, 5.0)
        assert queue._measured is None
        queue.observed(full, 5, 5.0)
        queue.observed(empty, 5, 5.0)
        assert queue._measured is full

    virtual(main)


def test_free_slots_are_those_of_an_engine_that_lives_and_serves() -> None:
    one = lane(3, serves=False)
    assert one.free == 0
    one.serves.set()
    one.taken = 1
    assert one.free == 2
    one.failure = EngineFailed("out")
    assert one.free == 0


# --- requests of one prompt ---------------------------------------------------------------------------------


def test_a_prompt_keeps_its_engine_while_that_has_a_free_slot() -> None:
    async def main() -> None:
        first, second = lane(3), lane(5)
        queue = queue_of(first, second, routing="prefix")
        home = (await taken(queue, 1, "a"))[0][0]
        other = second if home is first else first
        assert [one is home for one, _ in await taken(queue, 2, "a")] == [True, True]
        assert (await taken(queue, 1, "b"))[0][0] is other  # it has the least work
        home.taken = home.slots
        assert (await taken(queue, 1, "a"))[0][0] is other

    virtual(main)


def test_a_prompt_has_a_home_until_its_last_request_there_ends() -> None:
    async def main() -> None:
        first, second = lane(4), lane(4)
        queue = queue_of(first, second, routing="prefix")
        [(home, one), (_, two)] = await taken(queue, 2, "a")
        queue.release(home, one)
        assert queue._homes == {"a": (home, 1)}
        queue.release(home, two)
        assert queue._homes == {}
        await taken(queue, 1, "a")
        assert sum(count for _, count in queue._homes.values()) == 1

    virtual(main)


def test_requests_that_found_their_home_full_leave_it_where_it_is() -> None:
    async def main() -> None:
        first, second = lane(1), lane(3)
        queue = queue_of(first, second, routing="prefix")
        second.taken = 2  # so the first is the one with the least work
        [(home, _)] = await taken(queue, 1, "a")
        assert home is first
        [(away, ticket)] = await taken(queue, 1, "a")
        assert away is second
        assert queue._homes == {"a": (first, 1)}
        queue.release(away, ticket)
        assert queue._homes == {"a": (first, 1)}

    virtual(main)


def test_only_prefix_routing_knows_prompts() -> None:
    queue = queue_of(routing="least-work")
    assert queue.ticket(0, "a").group is None
    assert queue_of(routing="prefix").ticket(0, "a").group == "a"


# --- no engine -----------------------------------------------------------------------------------------------


def test_while_no_engine_lives_requests_wait_and_then_fail_with_the_reasons() -> None:
    async def main() -> None:
        dead, other = lane(1), lane(1)
        queue = queue_of(dead, other)
        dead.failure, other.failure = EngineFailed("out of memory"), EngineFailed("hung")
        clock = asyncio.get_running_loop().time
        began = clock()
        waiting = [asyncio.create_task(queue.take(queue.ticket(0))) for _ in range(2)]
        await asyncio.sleep(3.0)
        late = asyncio.create_task(queue.take(queue.ticket(0)))
        for one in (*waiting, late):
            with pytest.raises(EngineFailed, match=r"^no engine is left: out of memory; hung$"):
                await one
        assert clock() - began == PATIENCE  # from when the first of them waited
        assert queue.waiting == 0
        with pytest.raises(EngineFailed):
            await queue.take(queue.ticket(0))
        assert clock() - began == 2 * PATIENCE

    virtual(main)


def test_before_any_engine_has_started_that_is_the_reason() -> None:
    assert str(queue_of().none_left()) == "no engine is left: none has started"


def test_an_engine_that_joins_ends_the_wait() -> None:
    """One that is not ready yet, too: what waits is told of no end, however long it takes."""

    async def main() -> None:
        queue = queue_of()
        waiting = asyncio.create_task(queue.take(queue.ticket(0)))
        await asyncio.sleep(PATIENCE - 1)
        joined = lane(1, serves=False)
        assert queue.put(0, joined) is None
        await asyncio.sleep(5 * PATIENCE)
        assert not waiting.done()
        joined.serves.set()
        queue.changed(joined)
        assert await waiting is joined
        again = lane(1)
        assert queue.put(0, again) is joined
        assert queue.live == [joined, again][1:]

    virtual(main)


def test_the_wait_begins_again_when_the_last_engine_dies_again() -> None:
    async def main() -> None:
        queue, clock = queue_of(), asyncio.get_running_loop().time
        began = clock()
        waiting = asyncio.create_task(queue.take(queue.ticket(0)))
        await asyncio.sleep(PATIENCE - 1)
        joined = lane(1, serves=False)
        queue.put(0, joined)
        joined.failure = EngineFailed("died")
        queue.changed(joined)
        with pytest.raises(EngineFailed, match="died"):
            await waiting
        assert clock() - began == 2 * PATIENCE - 1

    virtual(main)


def test_an_engine_that_was_taken_out_of_its_place_is_no_reason() -> None:
    one, two = lane(1), lane(1)
    queue = queue_of(one, two)
    queue.remove(one)
    assert queue.places == {1: two}
    assert not queue.vacant
    two.failure = EngineFailed("died")
    assert queue.vacant
    assert queue.live == []


# --- the queue -----------------------------------------------------------------------------------------------


def test_the_lowest_priority_number_goes_first_and_then_the_earliest() -> None:
    async def main() -> None:
        only = lane(1)
        queue = queue_of(only)
        [(_, holding)] = await taken(queue)
        tickets = {name: queue.ticket(priority) for name, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 1))}
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
        gone, stays = queue.ticket(0), queue.ticket(0)
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
        first, second = (asyncio.create_task(queue.take(queue.ticket(0))) for _ in range(2))
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
            queue.changed(lanes[0])
            assert len(queue._open) <= 4 * len(lanes) + 64
        assert {id(one) for _, stamp, one in queue._open if stamp == one.stamp} == set(map(id, lanes))
        await taken(queue, 12)
        assert [one.taken for one in lanes] == [4, 4, 4]

    virtual(main)
