"""What a scheduler counts and holds, against what it was seen to do."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rollflow.storage.errors import RollflowError
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import (
    Cursor,
    Discard,
    DiscardReason,
    Ending,
    GroupKey,
    Prompt,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.clock import run_virtual
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.issue_order import Issue
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.scheduler import ResumePoint, RolloutScheduler, SchedulerPorts
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest
from tests.support.pipeline import Pipeline


class Seen(RolloutScheduler):
    """Notes what it does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gone: list[Discard] = []
        self.scored: list[TrajectoryGroup] = []
        self.kept = self.made = 0

    async def _generated(self, tokens: int) -> None:
        self.made += tokens
        await super()._generated(tokens)

    def _discard(self, discard: Discard) -> None:
        self.gone.append(discard)
        super()._discard(discard)

    def _scored(self, group: TrajectoryGroup, rollout: GroupRollout) -> None:
        self.scored.append(group)
        before = len(self.buffer)
        super()._scored(group, rollout)
        self.kept += len(self.buffer) - before


@pytest.fixture(scope="module")
def seen() -> Seen:
    """A run in which groups are too slow, redundant or filtered, and responses are surplus."""
    choices = {"extra_groups": 2, "extra_responses": 1, "at_bound": "drop", "filter": FilterConfig(min_mean=0.0)}
    common: dict[str, Any] = {"versions": 12, "slots": 16, "sigma": 1.5, "train_seconds": 0.05}
    pipeline = Pipeline(MemoryStore(uuid.uuid4().hex), scheduler_type=Seen, choices=choices, **common)
    run_virtual(pipeline.run())
    assert isinstance(pipeline.scheduler, Seen)
    return pipeline.scheduler


def test_tokens_and_trajectories_are_counted(seen: Seen) -> None:
    counts = seen.counts
    assert counts.tokens == seen.made > 0
    assert counts.discards == Counter(one.reason for one in seen.gone)
    assert min(counts.discards[reason] for reason in (DiscardReason.REDUNDANT, DiscardReason.FILTERED)) > 1
    assert counts.discarded_tokens == sum(one.response_tokens for one in seen.gone)
    assert counts.dropped_tokens == sum(one.response_tokens for one in seen.gone if one.slow)
    assert 0 < counts.dropped_tokens < counts.discarded_tokens
    assert counts.filtered == {"mean reward at or below 0": counts.discards[DiscardReason.FILTERED]}
    assert counts.surplus_tokens == sum(group.surplus_tokens for group in seen.scored) > 0
    assert counts.trajectories == 2 * seen.kept
    assert seen.kept > 12 * 4


def test_nothing_is_held_of_what_has_ended(seen: Seen) -> None:
    assert seen._aborts == set()
    assert seen._left_behind <= set(seen._running.values())
    assert seen.running == len(seen._running)
    assert 0 <= seen._generating == sum(rollout.unanswered for rollout in seen._running.values())


# --- one that stands still ------------------------------------------------------------------------------------

LIMITS = RolloutLimits(0, 5, 1, 1, 1.0, 8, 1, 8, 1.0)


async def scheduler_of(limits: RolloutLimits = LIMITS, resume: ResumePoint | None = None) -> RolloutScheduler:
    """Nothing runs yet; it has no engines."""

    async def score(request: ScoreRequest) -> Score:
        return Score(1.0, "")

    async def commit(staged: StagedBatch) -> None:
        pass

    ports = SchedulerPorts(lambda index: Prompt("p", index, "", "", (1,)), score, commit)
    return RolloutScheduler(limits, ports, InferenceProxy([], 4), resume or ResumePoint())


def inside(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await main()

    run_virtual(bounded())


def test_the_newest_version_is_what_counts_however_late_an_older_one_is_told_of() -> None:
    async def main() -> None:
        scheduler = await scheduler_of()
        scheduler.published(3)
        scheduler._ready.clear()
        scheduler.published(2)
        assert scheduler._published == 3
        assert scheduler._ready.is_set()

    inside(main)


def test_an_engine_that_joins_wakes_it() -> None:
    async def main() -> None:
        scheduler = await scheduler_of()
        assert not scheduler._room.is_set()
        scheduler._proxy.version = 2
        scheduler._proxy.on_change()
        assert scheduler._room.is_set()
        assert scheduler._ready.is_set()
        assert scheduler._published == 2
        scheduler._discard(Discard(GroupKey(7, 0), DiscardReason.STALE, 0, 5))
        assert scheduler._order.next(0).key.prompt == 0  # left behind under version 2, it waits for a newer one
        scheduler._proxy.version = 3
        scheduler._proxy.on_change()
        assert scheduler._order.next(0).key == GroupKey(7, 1)

    inside(main)


def test_where_a_scheduler_begins() -> None:
    async def main() -> None:
        resume = ResumePoint(3, Cursor((9,), (0,)), (GroupKey(8, 1),), missing=(1, 4, 5, 6), voids=2, behind=((8, 3),))
        scheduler = await scheduler_of(resume=resume)
        assert (scheduler.number, scheduler.voids, scheduler.running) == (3, 2, 0)
        assert scheduler.due.missing == (1, 4)  # those beyond the run's end are nobody's any more
        assert scheduler.due.last == 5
        assert scheduler._order.next(0).key == GroupKey(8, 1)
        assert scheduler._order.next(0).key == GroupKey(9, 0)

    inside(main)


def scored(scheduler: RolloutScheduler, prompt: int, reward: float, started: int = 0) -> None:
    """A group of one response ended with this reward."""
    one = Trajectory(0, started, (1,), (True,), (0.0,), (started,), reward, "", Ending.STOP)
    rollout = scheduler._rollout(Issue(GroupKey(prompt, 0), 1, awaited=True))
    scheduler._scored(TrajectoryGroup(rollout.key, "p", "d", (one,)), rollout)


def test_filtered_in_a_row_are_those_without_a_kept_one_between() -> None:
    async def main() -> None:
        limits = replace(LIMITS, filter=FilterConfig(min_mean=0.0, most=3))
        scheduler = await scheduler_of(limits)
        for prompt, reward in enumerate([0.0, 0.0, 1.0, 0.0, 0.0]):
            scored(scheduler, prompt, reward)
        assert len(scheduler.buffer) == 1
        with pytest.raises(RollflowError, match=r"removed 3 groups in a row \(the last: mean reward at or below 0\)"):
            scored(scheduler, 5, 0.0)
        assert scheduler.counts.filtered["mean reward at or below 0"] == 5

    inside(main)


def test_a_group_that_came_too_late_for_the_next_batch_is_dropped() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(resume=ResumePoint(number=3))
        scored(scheduler, 0, 1.0, started=1)
        assert len(scheduler.buffer) == scheduler.counts.trajectories == 0
        assert [one.reason for one in scheduler._discards] == [DiscardReason.STALE]
        scored(scheduler, 1, 1.0, started=2)  # batch 3 allows it
        assert len(scheduler.buffer) == scheduler.counts.trajectories == 1

    inside(main)


def test_what_was_too_slow_is_redundant_where_more_was_started_than_needed() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, extra_groups=1), ResumePoint(number=3))
        scored(scheduler, 0, 1.0, started=1)
        assert [one.reason for one in scheduler._discards] == [DiscardReason.REDUNDANT]

    inside(main)


def test_a_full_batch_is_staged_with_all_that_was_issued_and_discarded_before() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(resume=ResumePoint(number=1, cursor=Cursor((1,), (0,))))
        assert scheduler._stage() is None
        for prompt in (1, 2, 3):
            assert scheduler._order.next(1).key.prompt == prompt
        scheduler._discard(gone := Discard(GroupKey(3, 0), DiscardReason.FAILED, 0, 5))
        scored(scheduler, 2, 1.0)
        scheduler._room.clear()
        staged = scheduler._stage()
        assert staged is not None
        assert (staged.number, staged.issued, staged.discards) == (1, (1, 2, 3), (gone,))
        assert [group.key.prompt for group in staged.groups] == [2]
        assert scheduler.number == 2
        assert scheduler._room.is_set()
        assert scheduler._stage() is None
        scored(scheduler, 4, 1.0, started=1)
        staged = scheduler._stage()
        assert staged is not None
        assert (staged.number, staged.issued, staged.discards) == (2, (), ())

    inside(main)
