"""Tests the distribution of responses over the reward actor and its helpers: each response gets one score, although
helpers start and are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.spread.fleet import Helper, HelperFleet
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.members import PlaceLost
from rollflow.tasks.scorers.spread.spread import ScoringPlace, SpreadScorer, choose_place

SLOTS = {"": 2}


class TimedPlace(Scorer, Helper):
    """A fake reward actor or helper that scores `workers` responses at a time. The reason of a score is the name of the
    fake; `lose` loses all its responses.
    """

    def __init__(self, name: str, seconds: float = 1.0, *, workers: int = 2, starts: bool = True) -> None:
        self.name, self.seconds, self.starts = name, seconds, starts
        self.error: Exception = PlaceLost("no such node")
        self.usage, self._workers = ScorerUsage(), asyncio.Semaphore(workers)
        self.asked, self.most, self.exchanges, self.ended = list[int](), 0, 0, False
        self._running, self._lost = set[asyncio.Task[Score]](), False

    async def start(self) -> None:
        await asyncio.sleep(0.5)
        if not self.starts:
            raise self.error

    async def exchange(self) -> None:
        self.exchanges += 1
        if self._lost:
            raise PlaceLost("its node died")

    async def end(self) -> None:
        self.ended = True
        self.lose()

    def lose(self) -> None:
        self._lost = True
        for task in self._running:
            task.cancel()

    async def _score(self, request: ScoreRequest) -> Score:
        try:
            async with self._workers:
                if not self._lost:
                    await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            raise PlaceLost("its node died") from None
        if self._lost:
            raise PlaceLost("its node died")
        self.usage.scored += 1
        return Score(float(request.tokens[0]), self.name, Outcome.CORRECT, seconds=self.seconds)

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        found = [asyncio.create_task(self._score(request)) for request in requests]
        self.asked += [request.tokens[0] for request in requests]
        self._running |= set(found)
        for task in found:
            task.add_done_callback(self._running.discard)
        self.most = max(self.most, len(self._running))
        return list(found)


def ask(numbers: Sequence[int], scorer: str = "") -> list[ScoreRequest]:
    return [ScoreRequest([number], {}, scorer) for number in numbers]


@dataclass
class Run:
    """A scorer with a fleet of helpers (a changing number of them), as in the reward actor."""

    least: int = 1
    most: int = 3
    starts: Sequence[bool] = ()
    seconds: float = 1.0
    error: Exception = field(default_factory=lambda: PlaceLost("no such node"))
    home: TimedPlace = field(default_factory=lambda: TimedPlace("home"))
    helpers: list[TimedPlace] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spread = SpreadScorer(self.home, SLOTS)
        follower = QueueFollower(self.least, self.most, 5.0, 20.0)
        self.fleet = HelperFleet(self.spread, follower, self._build, self.warned.append)
        self.running = asyncio.create_task(self.fleet.run())

    def _build(self) -> TimedPlace:
        number = len(self.helpers)
        starts = self.starts[number] if number < len(self.starts) else True
        self.helpers.append(TimedPlace(f"helper {number}", self.seconds, starts=starts))
        self.helpers[-1].error = self.error
        return self.helpers[-1]

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


@given(loads=st.lists(st.integers(0, 5), min_size=1, max_size=8), closed=st.sets(st.integers(0, 7)))
def test_reward_actor_with_the_smallest_load_is_chosen(loads: list[int], closed: set[int]) -> None:
    places = [ScoringPlace(lambda requests: []) for _ in loads]
    for number, (place, load) in enumerate(zip(places, loads, strict=True)):
        place.loads[""], place.open = load, number not in closed
    free = [load for number, load in enumerate(loads) if number not in closed and load < 4]
    chosen = choose_place(places, "", 2)
    assert (chosen is None) == (not free)
    if chosen:
        assert chosen.loads[""] == min(free)
        assert chosen is next(place for place in places if place.open and place.loads[""] == min(free))


@given(
    calls=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.3, 2.0])), max_size=12),
    lost=st.lists(st.floats(0.1, 40.0), max_size=6),
    starts=st.lists(st.booleans(), max_size=4),
    least=st.integers(1, 3),
)
def test_every_response_gets_one_score_in_order(
    calls: list[tuple[int, float]], lost: list[float], starts: list[bool], least: int
) -> None:
    async def main() -> None:
        run, futures, number = Run(least, 3, starts), list[asyncio.Future[Score]](), 0

        def lose() -> None:
            if run.helpers:
                run.helpers[-1].lose()

        for seconds in lost:
            asyncio.get_running_loop().call_later(seconds, lose)
        for size, pause in calls:
            futures += run.spread.submit(ask(range(number, number + size)))
            number += size
            await asyncio.sleep(pause)
        scores = await asyncio.gather(*futures)
        assert [score.value for score in scores] == list(range(number))
        assert run.spread.usage.scored == number
        assert run.spread.count_wanted() == 0
        assert run.spread.home.idle
        assert all(member.place is None or member.place.idle for member in run.fleet._members)
        await run.close()
        assert all(helper.ended for helper in run.helpers)
        assert run.fleet.count == 0

    run_virtual(main())


def test_long_queue_of_responses_starts_reward_helpers() -> None:
    async def main() -> None:
        run = Run(1, 3)
        futures = run.spread.submit(ask(range(4)))
        await asyncio.gather(*futures)
        assert run.helpers == []  # a short burst starts no helper
        futures = run.spread.submit(ask(range(200)))
        await asyncio.sleep(4.0)
        assert run.helpers == []
        await asyncio.sleep(4.0)
        assert run.fleet.count == 2
        await asyncio.gather(*futures)
        assert asyncio.get_running_loop().time() < 2 + 5 + 1 + 200 / 6 + 5  # the reward actor and two helpers scored
        await asyncio.sleep(15.0)
        assert run.fleet.count == 2  # a short pause ends no helper
        await asyncio.sleep(10.0)
        assert run.fleet.count == 0
        assert all(helper.ended for helper in run.helpers)
        assert run.warned == []
        await run.close()

    run_virtual(main())


def test_smallest_number_of_reward_helpers_always_runs() -> None:
    async def main() -> None:
        run = Run(3, 3)
        await asyncio.sleep(100.0)
        assert run.fleet.count == len(run.helpers) == 2
        assert all(helper.exchanges > 40 for helper in run.helpers)
        await run.close()

    run_virtual(main())


def test_ending_reward_helper_continues_if_the_queue_grows() -> None:
    async def main() -> None:
        run = Run(1, 2, seconds=60.0)
        futures = run.spread.submit(ask(range(40)))
        await asyncio.sleep(100.0)  # only two responses of the helper have no score
        assert run.fleet.count == 1
        assert not run.fleet._members[0].stays
        futures += run.spread.submit(ask(range(40, 60)))
        await asyncio.sleep(7.0)
        assert run.fleet._members[0].stays
        assert len(run.helpers) == 1
        await asyncio.gather(*futures)
        await run.close()

    run_virtual(main())


def test_slow_reward_helper_gets_fewer_responses() -> None:
    async def main() -> None:
        run = Run(2, 2, seconds=9.0)
        await asyncio.sleep(1.0)
        scores = await asyncio.gather(*run.spread.submit(ask(range(100))))
        assert [score.value for score in scores] == list(range(100))
        [slow] = run.helpers
        assert 4 * len(slow.asked) < len(run.home.asked)
        assert slow.most <= 4
        await run.close()

    run_virtual(main())


def test_fast_reward_helper_gets_many_responses_at_once() -> None:
    async def main() -> None:
        run = Run(2, 2, seconds=0.001, home=TimedPlace("home", 0.001))
        await asyncio.sleep(1.0)
        await asyncio.gather(*run.spread.submit(ask(range(4000))))
        assert min(run.home.most, run.helpers[0].most) > 300
        await run.close()

    run_virtual(main())


def test_response_lost_by_two_helpers_is_scored_by_the_actor() -> None:
    async def main() -> None:
        run = Run(2, 2)
        while len(run.helpers) < 4:  # each helper is lost at its first response
            futures = run.spread.submit(ask(range(8)))
            await asyncio.sleep(1.5)
            run.helpers[-1].lose()
            await asyncio.gather(*futures)
            await asyncio.sleep(1.5)
        assert len(run.warned) >= 3
        await run.close()

    run_virtual(main())


def test_response_kept_by_the_reward_actor_delays_no_helper() -> None:
    async def main() -> None:
        home = TimedPlace("home", 1000.0)
        run = Run(2, 2, home=home)
        await asyncio.sleep(1.0)
        kept = run.spread.submit(ask(range(8)))  # the reward actor and the helper get four responses each
        for _ in range(2):
            run.helpers[-1].lose()
            await asyncio.sleep(2.0)  # the next helper starts within 1.5 s
        more = run.spread.submit(ask(range(100, 120)))
        await asyncio.sleep(60.0)
        assert all(future.done() for future in more), "they wait for the responses that only home may score"
        await asyncio.gather(*kept)
        await run.close()

    run_virtual(main())


def test_closing_waits_for_a_reward_helper_that_is_ending() -> None:
    class Slow(TimedPlace):
        async def end(self) -> None:
            await asyncio.sleep(3.0)
            await super().end()

    async def main() -> None:
        run = Run(2, 2)
        run.fleet._build = lambda: Slow("helper")
        await asyncio.sleep(1.0)
        [member] = run.fleet._members
        member.link.lose()  # type: ignore[attr-defined]
        await asyncio.sleep(2.5)
        assert member not in run.fleet._members
        await run.close()
        assert member.link.ended  # type: ignore[attr-defined]

    run_virtual(main())


@pytest.mark.parametrize("error", [PlaceLost("no such node"), RuntimeError("no such node")])
def test_failed_starts_of_helpers_are_repeated_ever_more_rarely(error: Exception) -> None:
    async def main() -> None:
        run = Run(2, 2, starts=[False] * 50, error=error)
        scores = await asyncio.gather(*run.spread.submit(ask(range(8))))
        assert {score.reason for score in scores} == {"home"}
        await asyncio.sleep(300.0)
        assert 5 <= len(run.helpers) <= 12
        assert all("no such node" in text for text in run.warned)
        await run.close()

    run_virtual(main())


def test_helper_gets_no_responses_of_other_scorers() -> None:
    async def main() -> None:
        run = Run(2, 2)
        await asyncio.sleep(1.0)
        scores = await asyncio.gather(*run.spread.submit([*ask(range(6), "judge"), *ask(range(6, 12))]))
        assert [score.value for score in scores] == list(range(12))
        assert run.helpers[0].asked
        assert min(run.helpers[0].asked) >= 6
        await run.close()

    run_virtual(main())


def test_scorer_error_reaches_the_caller_of_every_response() -> None:
    class Refusing(TimedPlace):
        async def _score(self, request: ScoreRequest) -> Score:
            raise ConfigError("no worker gets ready")

    async def main() -> None:
        spread = SpreadScorer(Refusing("home"), SLOTS)
        found = await asyncio.gather(*spread.submit(ask(range(9))), return_exceptions=True)
        assert [str(error) for error in found] == ["no worker gets ready"] * 9
        assert spread.count_wanted() == 0

    run_virtual(main())


@given(
    wanted=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    least=st.integers(1, 3),
    more=st.integers(0, 4),
    grow=st.integers(0, 5),
    idle=st.integers(0, 9),
)
def test_helper_count_changes_only_after_a_full_time_span(
    wanted: list[int], least: int, more: int, grow: int, idle: int
) -> None:
    follower, count = QueueFollower(least, least + more, grow, idle), least
    bounded = [min(max(number, least), least + more) for number in wanted]
    for now, number in enumerate(wanted):
        before, count = count, follower.decide(float(now), number)
        assert least <= count <= least + more
        if count > before:
            assert now >= grow
            assert count == min(bounded[now - grow : now + 1])
        elif count < before:
            assert now >= idle
            assert count == max(bounded[now - idle : now + 1])
        else:
            assert now < grow or min(bounded[now - grow : now + 1]) <= count
            assert now < idle or max(bounded[now - idle : now + 1]) >= count


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_faster_reward_actor_has_room_for_more_responses(seconds: float) -> None:
    place = ScoringPlace(lambda requests: [])
    for _ in range(40):
        place.note_score("", Score(1.0, seconds=seconds))
    assert place.count_room("", 2) == (512 if seconds == 0 else 4)
