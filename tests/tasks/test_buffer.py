"""Compares the buffer of finished groups with a simple implementation of the same decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.tasks.rollout.buffer import Rank, TrajectoryBuffer


def group(prompt: int, started: int) -> TrajectoryGroup:
    one = Trajectory(0, started, (1,), (True,), (0.0,), (started,), 1.0, "", StopReason.STOP)
    return TrajectoryGroup(GroupKey(prompt, 0), f"p{prompt}", "d", (one,))


def keys(buffer: TrajectoryBuffer) -> list[GroupKey]:
    """Return the keys of the waiting groups, in the order of the buffer."""
    return [waiting.group.key for waiting in buffer._groups]


STARTS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12)


@given(starts=STARTS, bound=st.sampled_from([0.0, 0.5, 1.0, 2.5, 5.0]), order=st.randoms(use_true_random=False))
def test_counts_of_the_buffer_equal_a_simple_implementation(
    starts: list[tuple[int, bool]], bound: float, order: object
) -> None:
    buffer, ranks = TrajectoryBuffer(), []
    places = list(enumerate(starts))
    order.shuffle(places)  # type: ignore[attr-defined]  # `order` is a `Random`
    for prompt, (started, awaited) in places:
        buffer.add(group(prompt, started), prompt, awaited=awaited)
        ranks.append(Rank(started, not awaited, GroupKey(prompt, 0)))
    assert keys(buffer) == [rank.key for rank in sorted(ranks)]
    assert [buffer.count_before(issue) for issue in range(len(starts) + 1)] == list(range(len(starts) + 1))
    assert buffer.count_older(bound) == sum(rank.started_version < bound for rank in ranks)
    for rank in [*ranks, Rank(2, True, GroupKey(-1, -1)), Rank(2, False, GroupKey(3, 0))]:
        assert buffer.count_ahead(rank) == sum(other < rank for other in ranks)


@given(starts=STARTS, count=st.integers(0, 6), oldest=st.integers(0, 3), in_order=st.booleans())
def test_buffer_takes_fresh_groups_by_rank_or_issue_order(
    starts: list[tuple[int, bool]], count: int, oldest: int, in_order: bool
) -> None:
    buffer = TrajectoryBuffer()
    for prompt, (started, awaited) in enumerate(starts):
        buffer.add(group(prompt, started), len(starts) - prompt, awaited=awaited)
    ranked = sorted((started, not awaited, prompt) for prompt, (started, awaited) in enumerate(starts))
    fresh = [one for one in ranked if one[0] >= oldest]
    if in_order:
        fresh.sort(key=lambda one: -one[2])
    wanted = sorted((started, prompt) for started, _, prompt in fresh[:count])
    assert [g.key.prompt for g in buffer.drop(oldest)] == [prompt for started, _, prompt in ranked if started < oldest]
    taken = buffer.take(count, in_order=in_order)
    assert [(g.started_version, g.key.prompt) for g in taken] == wanted
    left = {one[2] for one in ranked if one[0] >= oldest} - {prompt for _, prompt in wanted}
    assert {key.prompt for key in keys(buffer)} == left
    assert keys(buffer) == [GroupKey(prompt, 0) for _, _, prompt in ranked if prompt in left]
