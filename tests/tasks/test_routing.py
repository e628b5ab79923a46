"""The choice of an engine for a request, worked by hand."""

from __future__ import annotations

import random

import pytest

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.rollout.slots import EngineSlots, Ticket
from tests.support.lanes import lane, queue_of, taken, virtual


def test_unmeasured_engines_share_evenly() -> None:
    async def main() -> None:
        first, second = lane(4), lane(4)
        await taken(queue_of(first, second), 4)
        assert (first.taken, second.taken) == (2, 2)

    virtual(main)


def test_triple_pace_gets_triple_requests() -> None:
    """One more request costs 1 x 3 s on the slow engine, and 1 x 1, 2 x 1, 3 x 1 s on the fast one. In a tie the engine
    that was offered first gets it."""

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
def test_request_goes_to_the_engine_done_first(count: int) -> None:
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


def test_unmeasured_engine_has_the_first_measured_pace() -> None:
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


def test_load_of_an_unmeasured_engine_counts() -> None:
    async def main() -> None:
        measured, fresh = lane(4), lane(4)
        queue = queue_of(measured, fresh)
        queue.observe(measured, 10, 20.0)
        measured.taken = 1
        queue.offer_slots(measured)
        queue.offer_slots(fresh)
        assert [one for one, _ in await taken(queue, 1)] == [fresh]

    virtual(main)


def test_pace_is_a_moving_average() -> None:
    one = lane(1)
    one.observe(10, 2.0)
    assert (one.tokens, one.seconds) == (10, 2.0)
    one.observe(20, 1.0)
    assert (one.tokens, one.seconds) == pytest.approx((11.0, 1.9))  # the new value has a weight of one tenth
    one.observe(0, 0.0)
    assert (one.tokens, one.seconds) == pytest.approx((9.9, 1.71))


def test_response_without_tokens_sets_no_pace() -> None:
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


def test_prompt_keeps_its_home_until_its_last_request_ends() -> None:
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


def test_overflow_requests_do_not_move_the_home() -> None:
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


def test_only_prefix_routing_uses_prompts() -> None:
    async def main() -> None:
        queue = queue_of(lane(2))
        assert queue.create_ticket(0, "a").group is None
        await taken(queue, 2, "a")
        assert queue._homes == {}
        assert queue_of(routing="prefix").create_ticket(0, "a").group == "a"

    virtual(main)
