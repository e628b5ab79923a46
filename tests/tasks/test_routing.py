"""Which engine a request goes to: worked by hand."""

from __future__ import annotations

import random

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.rollout.slots import EngineSlots, Ticket
from tests.support.lanes import lane, queue_of, taken, virtual


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
        queue.observe(slow, 10, 30.0)
        queue.observe(fast, 20, 20.0)
        queue.offer_slots(slow)
        queue.offer_slots(fast)
        assert [one is fast for one, _ in await taken(queue, 8)] == [True, True, False, True, True, True, False, True]

    virtual(main)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_it_is_always_the_engine_that_would_be_done_first(count: int) -> None:
    """However often the others are offered meanwhile. At a tie it is any of them."""
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


def test_what_was_never_measured_has_the_pace_of_who_was_measured_first() -> None:
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


def test_it_counts_what_such_an_engine_runs_already() -> None:
    async def main() -> None:
        measured, fresh = lane(4), lane(4)
        queue = queue_of(measured, fresh)
        queue.observe(measured, 10, 20.0)
        measured.taken = 1
        queue.offer_slots(measured)
        queue.offer_slots(fresh)
        assert [one for one, _ in await taken(queue, 1)] == [fresh]

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
    empty, full = lane(1), lane(1)
    queue = queue_of(empty, full)
    queue.observe(empty, 0, 5.0)
    assert queue._measured is None
    queue.observe(full, 5, 5.0)
    queue.observe(empty, 5, 5.0)
    assert queue._measured is full


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
    async def main() -> None:
        queue = queue_of(lane(2))
        assert queue.create_ticket(0, "a").group is None
        await taken(queue, 2, "a")
        assert queue._homes == {}
        assert queue_of(routing="prefix").create_ticket(0, "a").group == "a"

    virtual(main)
