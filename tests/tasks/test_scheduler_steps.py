"""Tests single steps of a scheduler whose loops do not run: how each step changes the scheduler's state and wakes
waiting loops.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollflow.storage.errors import RollflowError
from rollflow.storage.log.state import EpochPlace
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import (
    Cursor,
    Discard,
    DiscardReason,
    GroupKey,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.issue_order import Issue
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest

LIMITS = RolloutLimits(0, 5, 1, 1, 1.0, 8, 1, 8, 1.0)


async def scheduler_of(
    limits: RolloutLimits = LIMITS, resume: ResumePoint | None = None, version: int = -1
) -> RolloutScheduler:
    """Create a scheduler at policy version `version`, without running groups and without engines."""

    async def score(request: ScoreRequest) -> Score:
        return Score(1.0, "")

    async def commit(staged: StagedBatch) -> None:
        pass

    ports = SchedulerPorts(lambda index: Prompt("p", index, "", "", ModelInput.of((1,))), score, commit)
    proxy = InferenceProxy([], 4)
    proxy.version = version
    return RolloutScheduler(limits, ports, proxy, resume or ResumePoint())


class Nowhere:
    """A task group that runs nothing."""

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()


def started(scheduler: RolloutScheduler, version: int | None = None) -> GroupRollout:
    """Start one more group of responses, which never ends. If `version` is given, the group's first request has started
    under this version.
    """
    scheduler._start(scheduler.number, cast(asyncio.TaskGroup, Nowhere()))
    rollout = list(scheduler._running.values())[-1]
    if version is not None:
        rollout._note_start(0, version)
    return rollout


def inside(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await main()

    run_virtual(bounded())


def test_late_message_about_an_older_version_is_ignored() -> None:
    async def main() -> None:
        scheduler = await scheduler_of()
        scheduler.note_published(3)
        scheduler._ready.clear()
        scheduler.note_published(2)
        assert scheduler._published == 3
        assert scheduler._ready.is_set()

    inside(main)


def test_joining_engine_wakes_the_scheduler() -> None:
    async def main() -> None:
        scheduler = await scheduler_of()
        assert not scheduler._room.is_set()
        scheduler._proxy.version = 2
        scheduler._proxy.on_change()
        assert scheduler._room.is_set()
        assert scheduler._ready.is_set()
        assert scheduler._published == 2
        scheduler._discard(Discard(GroupKey(7, 0), DiscardReason.STALE, 0, 5))
        # Prompt 7 was preempted under version 2, and waits for a newer version.
        assert scheduler._order.next_issue(0).key.prompt == 0
        scheduler._proxy.version = 3
        scheduler._proxy.on_change()
        assert scheduler._order.next_issue(0).key == GroupKey(7, 1)

    inside(main)


def test_preempted_prompt_waits_for_a_newer_version() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(version=2)
        scheduler._discard(Discard(GroupKey(7, 0), DiscardReason.STALE, 0, 5))
        scheduler._proxy.on_change()  # another engine joined
        assert scheduler._order.next_issue(0).key.prompt == 0
        scheduler._proxy.version = 3
        scheduler._proxy.on_change()
        assert scheduler._order.next_issue(0).key == GroupKey(7, 1)

    inside(main)


def test_resume_point_of_the_scheduler_equals_the_log_state() -> None:
    cursor, key = Cursor((9,), (2,)), GroupKey(8, 1)
    there: dict[str, Any] = {"in_flight": (key,), "holes": [1], "voids": 2, "behind": {8: 4}, "redraws": {8: 1}}
    there["epochs"] = {0: EpochPlace(5, 1, end=12)}
    state: Any = SimpleNamespace(next_batch=3, cursor=cursor, **there)
    told = {"missing": (1,), "voids": 2, "behind": ((8, 4),), "redraws": ((8, 1),), "epochs": ((0, 12),)}
    assert ResumePoint.of_state(state) == ResumePoint(3, cursor, (key,), **told)  # type: ignore[arg-type]
    assert ResumePoint() == ResumePoint(0, Cursor(), (), missing=(), voids=0, behind=(), redraws=())


def test_scheduler_starts_at_its_resume_point() -> None:
    async def main() -> None:
        resume = ResumePoint(3, Cursor((9,), (0,)), (GroupKey(8, 1),), missing=(1, 4, 5, 6), voids=2, behind=((8, 3),))
        scheduler = await scheduler_of(resume=resume)
        assert (scheduler.number, scheduler.voids, scheduler.running) == (3, 2, 0)
        assert scheduler.due.missing == (1, 4)  # batches beyond the run's end are omitted
        assert scheduler.due.last == 5
        assert scheduler._order.next_issue(0).key == GroupKey(8, 1)
        assert scheduler._order.next_issue(0).key == GroupKey(9, 0)

    inside(main)


def scored(scheduler: RolloutScheduler, prompt: int, reward: float, started: int = 0, *, awaited: bool = True) -> None:
    """End a group of one response with this reward; the group counts as the group that was issued last."""
    one = Trajectory(0, started, (1,), (True,), (0.0,), (started,), reward, "", StopReason.STOP)
    rollout = scheduler._create_rollout(Issue(GroupKey(prompt, 0), 1, awaited=awaited))
    scheduler._add_scored(TrajectoryGroup(rollout.key, "p", "d", (one,)), rollout)


def test_kept_prompt_resets_the_count_of_filtered_prompts() -> None:
    async def main() -> None:
        limits = replace(LIMITS, filter=FilterConfig(min_mean=0.0, max_consecutive=3))
        scheduler = await scheduler_of(limits)
        for prompt, reward in enumerate([0.0, 0.0, 1.0, 0.0, 0.0]):
            scored(scheduler, prompt, reward)
        assert len(scheduler.buffer) == 1
        for count in (3, 4):
            with pytest.raises(
                RollflowError, match=rf"removed {count} groups in a row .the last group: mean reward at or "
            ):
                scored(scheduler, 2 + count, 0.0)
        assert scheduler.counts.filtered == {"mean reward at or below 0": 6}

    inside(main)


def test_group_too_old_for_the_next_batch_is_dropped() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(resume=ResumePoint(number=3))
        scored(scheduler, 0, 1.0, started=1)
        assert len(scheduler.buffer) == scheduler.counts.trajectories == 0
        assert [one.reason for one in scheduler._discards] == [DiscardReason.STALE]
        scored(scheduler, 1, 1.0, started=2)  # not too stale for batch 3
        assert len(scheduler.buffer) == scheduler.counts.trajectories == 1

    inside(main)


def test_slow_group_is_dropped_with_redundant_groups() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, redundant_groups=1), ResumePoint(number=3))
        scored(scheduler, 0, 1.0, started=1)
        assert [one.reason for one in scheduler._discards] == [DiscardReason.REDUNDANT]

    inside(main)


def test_batch_to_commit_lists_issued_and_discarded_prompts() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(resume=ResumePoint(number=1, cursor=Cursor((1,), (0,)), behind=((2, 1),)))
        assert scheduler._stage_batch() is None
        for prompt in (1, 2, 3):
            assert scheduler._order.next_issue(1).key.prompt == prompt
        scheduler._discard(gone := Discard(GroupKey(3, 0), DiscardReason.FAILED, 0, 5))
        scored(scheduler, 2, 1.0)
        scheduler._room.clear()
        staged = scheduler._stage_batch()
        assert staged is not None
        assert (staged.number, staged.issued, staged.discards) == (1, (1, 2, 3), (gone,))
        assert [group.key.prompt for group in staged.groups] == [2]
        assert not scheduler._order._behind  # the preemptions of a trained prompt are forgotten
        assert scheduler.number == 2
        assert scheduler._room.is_set()
        assert scheduler._stage_batch() is None
        scored(scheduler, 4, 1.0, started=1)
        staged = scheduler._stage_batch()
        assert staged is not None
        assert (staged.number, staged.issued, staged.discards) == (2, (), ())

    inside(main)


def test_scheduler_ends_after_its_last_batch() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, batches=0))
        await asyncio.wait_for(scheduler.run(), 10.0)
        assert scheduler.running == 0

    inside(main)


@pytest.mark.parametrize(("slots", "most"), [(None, math.inf), (3, 3), (6, 4)])  # an engine has four slots
def test_simulator_reads_the_state_of_the_scheduler(slots: int | None, most: float) -> None:
    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, group_size=2, slots=slots), ResumePoint(number=1), version=1)
        rollouts = [started(scheduler, 1) for _ in range(3)]
        assert [rollout.number for rollout in rollouts] == [1, 2, 3]
        scheduler._give_up(rollouts[0])
        scored(scheduler, 9, 1.0, started=1)
        scored(scheduler, 10, 1.0, started=1)
        supply = scheduler._read_supply()
        assert (supply.version, supply.due) == (1, scheduler.due)
        assert (supply.running, supply.outstanding, supply.generating, supply.slots) == (3, 2 + 2, 3 * 2, most)

    inside(main)


def test_ended_response_frees_its_slot_for_a_waiting_one() -> None:
    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, group_size=3))
        started(scheduler)
        await scheduler._count_response(5)
        await scheduler._count_response(7)
        assert (scheduler._generating, scheduler.counts.tokens) == (1, 12)
        assert scheduler._room.is_set()

    inside(main)

    # --- waiting and preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "full", "holds"), [(1, True, True), (2, True, True), (0, True, False), (1, False, False)]
)
def test_waiting_time_of_a_ready_learner_is_measured(published: int, full: bool, holds: bool) -> None:
    """Batch 1 waits for a running group that would be too old for batch 2."""

    async def main() -> None:
        scheduler = await scheduler_of(resume=ResumePoint(number=1))
        scheduler.note_published(published)
        started(scheduler, 0)
        if full:
            scored(scheduler, 9, 1.0, started=1)
        assert scheduler._stage_batch() is None
        assert (scheduler.counts.waited.since is not None) == holds

    inside(main)


@pytest.mark.parametrize(("published", "formed"), [(0, False), (1, True), (2, True)])
def test_batch_formed_early_interrupts_no_running_group(published: int, formed: bool) -> None:
    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, on_stale="drop"), ResumePoint(number=1))
        scheduler.note_published(published)
        rollout = started(scheduler, 0)
        scored(scheduler, 9, 1.0, started=1)
        assert (scheduler._stage_batch() is not None) == formed
        assert (rollout in scheduler._left_behind) == formed

    inside(main)


@pytest.mark.parametrize(("order", "first"), [("started", 8), ("finished", 9)])
def test_batch_order_decides_the_first_group(order: Any, first: int) -> None:
    """With "started", the group that was issued first comes first; with "finished", the group of the oldest version."""

    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, batch_order=order), ResumePoint(number=1))
        scheduler._issued = 1
        scored(scheduler, 8, 1.0, started=1)
        scheduler._issued = 2
        scored(scheduler, 9, 1.0, started=0)
        staged = scheduler._stage_batch()
        assert staged is not None
        assert [group.key.prompt for group in staged.groups] == [first]

    inside(main)


def test_awaited_group_goes_first_among_equally_old_groups() -> None:
    async def main() -> None:
        scheduler = await scheduler_of()
        scored(scheduler, 8, 1.0, awaited=False)
        scored(scheduler, 9, 1.0, awaited=True)
        staged = scheduler._stage_batch()
        assert staged is not None
        assert [group.key.prompt for group in staged.groups] == [9]

    inside(main)


def test_batch_does_not_wait_for_a_preempted_group() -> None:
    """The batch does not wait for a preempted group: neither because the group was issued earlier, nor after the group
    starts again.
    """

    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, batch_order="started"), ResumePoint(number=1))
        slow, scheduler._issued = started(scheduler, 0), 2
        scored(scheduler, 9, 1.0, started=1)
        started(scheduler, 1)
        assert scheduler._stage_batch() is None
        scheduler._give_up(slow)
        assert len(scheduler._aborts) == 1
        slow._note_start(0, 1)
        assert scheduler._starts.count_before(math.inf) == 1
        staged = scheduler._stage_batch()
        assert staged is not None
        await asyncio.sleep(0)
        assert slow._reason is DiscardReason.STALE
        await asyncio.sleep(1.0)
        assert scheduler._aborts == set()

    inside(main)


@pytest.mark.parametrize(("version", "batches", "given_up"), [(1, 4, True), (2, 4, False), (1, 3, False)])
def test_group_that_starts_under_an_old_version_is_preempted(version: int, batches: int, given_up: bool) -> None:
    """Batch 3 takes only groups that started under version 2 or later. After the last batch, running groups are not
    preempted.
    """

    async def main() -> None:
        scheduler = await scheduler_of(replace(LIMITS, batches=batches), ResumePoint(number=3))
        rollout = started(scheduler, version)
        assert (rollout in scheduler._left_behind) == given_up
        assert scheduler._starts.count_before(math.inf) == (not given_up)

    inside(main)


@pytest.mark.parametrize(("batches", "given_up"), [(4, True), (3, False)])
def test_group_too_old_after_a_batch_is_preempted(batches: int, given_up: bool) -> None:
    async def main() -> None:
        limits = replace(LIMITS, batches=batches, on_stale="drop")
        scheduler = await scheduler_of(limits, ResumePoint(number=2), version=2)
        old, new = started(scheduler, 1), started(scheduler, 2)
        scored(scheduler, 8, 1.0, started=1)
        scored(scheduler, 9, 1.0, started=1)
        staged = scheduler._stage_batch()
        assert staged is not None
        assert [one.key for one in staged.discards] == [GroupKey(9, 0)]
        assert new not in scheduler._left_behind
        assert scheduler._left_behind == ({old} if given_up else set())

    inside(main)
