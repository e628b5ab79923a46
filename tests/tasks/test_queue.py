"""The slot queue, in examples worked by hand: when a request gets a slot or an error, and from which engine.

`test_slots` tests the same with random operations.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.rollout.slots import EngineSlots, Ticket
from tests.support.lanes import PATIENCE, lane, queue_of, taken, virtual


def test_request_with_lowest_priority_number_gets_first_slot() -> None:
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


def test_withdrawn_engine_request_takes_no_slot() -> None:
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


def test_cancelled_request_frees_its_engine_slot() -> None:
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


def test_outdated_entries_of_the_request_heap_are_removed() -> None:
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
            with pytest.raises(EngineFailed, match=r"^no engine is left that can run requests: out of memory; hung$"):
                await one
        assert clock() - began == PATIENCE  # counted from the first waiting request
        assert queue.waiting == 0
        with pytest.raises(EngineFailed):
            await queue.take(queue.create_ticket(0))
        assert clock() - began == 2 * PATIENCE
        assert (
            str(queue_of().build_no_engine_error()) == "no engine is left that can run requests: no engine has started"
        )

    virtual(main)


def test_withdrawn_engine_request_gets_no_error() -> None:
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


def test_waiting_time_of_a_response_counts_from_its_request() -> None:
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


def test_joining_engine_ends_the_wait_of_requests() -> None:
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


def test_wait_for_an_engine_restarts_when_the_last_one_dies() -> None:
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


def test_removed_engine_does_not_fail_waiting_requests() -> None:
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


# --- the choice of an engine ----------------------------------------------------------------------------------


def test_unmeasured_engines_get_equally_many_requests() -> None:
    async def main() -> None:
        first, second = lane(4), lane(4)
        await taken(queue_of(first, second), 4)
        assert (first.taken, second.taken) == (2, 2)

    virtual(main)


def test_engine_of_triple_speed_gets_triple_requests() -> None:
    """One more request costs 1 x 3 s on the slow engine, and 1 x 1, 2 x 1, 3 x 1 s on the fast one. In a tie, the
    engine that was offered first gets the request.
    """

    async def main() -> None:
        slow, fast = lane(8), lane(8)
        queue = queue_of(slow, fast)
        queue.observe(slow, 10, 30.0)
        queue.observe(fast, 20, 20.0)
        queue.offer_slots(slow)
        queue.offer_slots(fast)
        assert [one is fast for one, _ in await taken(queue, 8)] == [True, True, False, True, True, True, False, True]

    virtual(main)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_request_goes_to_the_engine_that_would_finish_it_first(count: int) -> None:
    """The choice holds however often other engines are offered meanwhile. In a tie any of them may be chosen."""
    draw = random.Random(count)

    async def main() -> None:
        held: list[tuple[EngineSlots, Ticket]] = []
        lanes = [lane(6) for _ in range(count)]
        paces = {id(one): draw.randint(1, 20) for one in lanes}
        queue = queue_of(*lanes)
        for one in lanes:
            queue.observe(one, 10, 10.0 * paces[id(one)])
            queue.offer_slots(one)
        for _ in range(500):
            for one in draw.choices(lanes, k=draw.randint(0, 10)):
                queue.offer_slots(one)
            work = {id(one): (one.taken + 1) * paces[id(one)] for one in lanes if one.free}
            if not work or (held and draw.random() < 0.45):
                queue.release(*held.pop(draw.randrange(len(held))))
            else:
                held += await taken(queue)
                assert work[id(held[-1][0])] == min(work.values())
                assert sum(one.taken for one in lanes) == len(held)

    virtual(main)


def test_unmeasured_engine_has_the_first_measured_speed() -> None:
    async def main() -> None:
        measured, quicker, fresh = lane(9), lane(1), lane(9)
        queue = queue_of(measured, quicker, fresh)
        queue.observe(measured, 10, 20.0)
        queue.observe(quicker, 10, 1.0)
        queue.offer_slots(measured)
        queue.offer_slots(quicker)
        queue.offer_slots(fresh)
        found = [one for one, _ in await taken(queue, 5)]
        assert found[0] is quicker
        assert sorted(map(id, found[1:])) == sorted(map(id, [measured, measured, fresh, fresh]))

    virtual(main)


def test_load_of_an_unmeasured_engine_counts_in_routing() -> None:
    async def main() -> None:
        measured, fresh = lane(4), lane(4)
        queue = queue_of(measured, fresh)
        queue.observe(measured, 10, 20.0)
        measured.taken = 1
        queue.offer_slots(measured)
        queue.offer_slots(fresh)
        assert [one for one, _ in await taken(queue, 1)] == [fresh]

    virtual(main)


def test_engine_speed_is_a_moving_average() -> None:
    one = lane(1)
    one.observe(10, 2.0)
    assert (one.tokens, one.seconds) == (10, 2.0)
    one.observe(20, 1.0)
    assert (one.tokens, one.seconds) == pytest.approx((11.0, 1.9))  # the new value has a weight of one tenth
    one.observe(0, 0.0)
    assert (one.tokens, one.seconds) == pytest.approx((9.9, 1.71))


def test_response_without_tokens_does_not_change_engine_speed() -> None:
    empty, full = lane(1), lane(1)
    queue = queue_of(empty, full)
    queue.observe(empty, 0, 5.0)
    assert queue._measured is None
    queue.observe(full, 5, 5.0)
    queue.observe(empty, 5, 5.0)
    assert queue._measured is full


def test_only_a_live_serving_engine_has_free_slots() -> None:
    one = lane(3, serves=False)
    assert one.free == 0
    one.serves.set()
    one.taken = 1
    assert one.free == 2
    one.failure = EngineFailed("out")
    assert one.free == 0


# --- requests of one prompt ---------------------------------------------------------------------------------


def test_prompt_keeps_its_engine_with_a_free_slot() -> None:
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


def test_prompt_keeps_its_engine_until_its_last_request_ends() -> None:
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


def test_full_engine_remains_the_engine_of_its_prompt() -> None:
    async def main() -> None:
        first, second = lane(1), lane(3)
        queue = queue_of(first, second, routing="prefix")
        second.taken = 2  # so the first engine has the least work
        [(home, _)] = await taken(queue, 1, "a")
        assert home is first
        [(away, ticket)] = await taken(queue, 1, "a")
        assert away is second
        assert queue._homes == {"a": (first, 1)}
        queue.release(away, ticket)
        assert queue._homes == {"a": (first, 1)}

    virtual(main)


def test_only_prefix_routing_remembers_engines_of_prompts() -> None:
    async def main() -> None:
        queue = queue_of(lane(2))
        assert queue.create_ticket(0, "a").group is None
        await taken(queue, 2, "a")
        assert queue._homes == {}
        assert queue_of(routing="prefix").create_ticket(0, "a").group == "a"

    virtual(main)
