"""Compares the formation of batches (which groups a batch waits for) with a plain implementation of its definition, and
with examples worked by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.tasks.rollout.buffer import TrajectoryBuffer
from rollflow.tasks.rollout.formation import Formation
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.running_by_version import RunningByVersion


@dataclass(frozen=True)
class One:
    """A group that is waiting for a batch or running; its issue number is also the index of its prompt."""

    number: int
    started: int
    awaited: bool = True

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.number, 0)

    @property
    def rank(self) -> tuple[int, bool, GroupKey]:
        return self.started, not self.awaited, self.key

    @property
    def group(self) -> TrajectoryGroup:
        only = Trajectory(0, self.started, (1,), (True,), (0.0,), (self.started,), 1.0, "", StopReason.STOP)
        return TrajectoryGroup(self.key, f"p{self.number}", "d", (only,))


def formation(limits: RolloutLimits, waiting: list[One], running: list[One]) -> Formation:
    """Build a formation; the groups `running` take the place of dispatches and have the attributes that
    `RunningByVersion` reads.
    """
    buffer, starts = TrajectoryBuffer(), RunningByVersion()
    for one in waiting:
        buffer.add(one.group, one.number, awaited=one.awaited)
    for one in running:
        starts.add(one.started, cast(GroupRollout, one))
    return Formation(limits, buffer, starts)


def long_way(
    limits: RolloutLimits, waiting: list[One], running: list[One], number: int, busy: bool, lost: bool
) -> bool:
    """Decide literally by the definition whether a batch must wait (`Formation.must_wait`)."""
    groups, alpha = limits.groups, limits.async_ratio
    if limits.batch_order == "started":
        return bool(running) and sum(one.number < running[0].number for one in waiting) < groups

    def old(ones: list[One], later: int) -> list[One]:
        """List the groups that would be too old for the batch with the number `number + later`."""
        return [one for one in ones if one.started < number + later - alpha]

    late = old(running, 1)
    if busy and late:
        return True
    if not busy and any(one.awaited and sum(w.rank < one.rank for w in waiting) < groups for one in late):
        return True
    if limits.on_stale == "drop" or lost:
        return False
    further = range(1, math.floor(alpha) + 1)
    return any(
        len(old(running, 1 + later)) > later * groups and len(old(waiting, 1 + later)) < groups for later in further
    )


LIMITS = RolloutLimits(0, 10, 2, 2, 1.0, 8, 1, 9, 1.0)
ONES = st.lists(st.tuples(st.sampled_from([False, False, True]), st.integers(0, 6), st.booleans()), max_size=20)


@given(
    ones=ONES,
    number=st.integers(2, 6),
    limits=st.builds(
        replace,
        st.just(LIMITS),
        groups=st.integers(1, 4),
        async_ratio=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 2.9]),
        on_stale=st.sampled_from(["wait", "drop"]),
        batch_order=st.sampled_from(["finished", "finished", "started"]),
    ),
    busy=st.booleans(),
    lost=st.booleans(),
)
def test_batch_formation_agrees_with_the_plain_definition(
    ones: list[tuple[bool, int, bool]], number: int, limits: RolloutLimits, busy: bool, lost: bool
) -> None:
    every = [(runs, One(place, min(started, number), awaited)) for place, (runs, started, awaited) in enumerate(ones)]
    waiting, running = [one for runs, one in every if not runs], [one for runs, one in every if runs]
    found = formation(limits, waiting, running)
    assert found.oldest_allowed(number) == number - limits.async_ratio
    assert found.is_full == (len(waiting) >= limits.groups)
    if found.is_full:  # the scheduler calls `must_wait` only if enough groups wait
        waits = found.must_wait(number, (one.number for one in running), learner_is_busy=busy, is_lost=lost)
        assert waits == long_way(limits, waiting, running, number, busy, lost)


def waits(waiting: list[One], running: list[One], busy: bool = False, lost: bool = False, **limits: Any) -> bool:
    """Return whether batch 3 has to wait."""
    found = formation(replace(LIMITS, **limits), waiting, running)
    return found.must_wait(3, (one.number for one in running), learner_is_busy=busy, is_lost=lost)


def test_batch_in_order_of_start_waits_for_the_oldest_prompt() -> None:
    assert waits([One(0, 3), One(2, 3)], [One(1, 3)], batch_order="started")
    assert not waits([One(0, 3), One(1, 3)], [One(2, 0)], batch_order="started")
    assert waits([One(0, 3), One(2, 3), One(3, 3)], [One(1, 3), One(4, 0)], batch_order="started")


def test_batch_waits_for_a_group_too_old_for_the_next_batch() -> None:
    full = [One(1, 3), One(2, 3)]
    assert waits(full, [One(0, 2)])
    assert not waits(full, [One(0, 3)])  # this group is young enough for the next batch
    assert not waits(full, [One(0, 2, awaited=False)])
    assert waits(full, [One(0, 2, awaited=False)], busy=True)
    assert not waits([One(1, 1), One(3, 1)], [One(0, 2)])  # older groups already fill the batch
    assert waits([One(1, 1), One(3, 1)], [One(0, 2)], busy=True)


def test_batch_prefers_earlier_prompts_of_equal_age() -> None:
    assert waits([One(1, 2), One(2, 2)], [One(0, 2)])
    assert not waits([One(1, 2), One(2, 2)], [One(3, 2)])
    assert waits([One(1, 2), One(4, 2)], [One(3, 2), One(5, 2)])
    assert waits([One(1, 2, awaited=False), One(2, 2, awaited=False)], [One(3, 2)])  # awaited groups are taken first


def test_batch_waits_if_later_batches_cannot_take_running_groups() -> None:
    """At alpha = 2, batch 4 can still take two groups started under version 2; a third one would be dropped. At alpha =
    3, batch 4 can take two groups started under version 1, and batches 4 and 5 four groups started under version 2."""
    full = [One(1, 3), One(2, 3)]
    crowd = [One(10 + i, 2) for i in range(3)]
    assert waits(full, crowd, async_ratio=2.0)
    assert not waits(full, crowd[:2], async_ratio=2.0)
    assert not waits([One(1, 2), One(2, 2)], crowd, async_ratio=2.0)  # the groups of this batch are equally old
    assert not waits(full, crowd, async_ratio=2.0, on_stale="drop")
    assert not waits(full, crowd, async_ratio=2.0, lost=True)
    assert not waits(full, [One(10 + i, 2) for i in range(4)], async_ratio=3.0)
    assert waits(full, [One(10 + i, 2) for i in range(5)], async_ratio=3.0)
    assert waits(full, [One(10 + i, 1) for i in range(3)], async_ratio=3.0)
