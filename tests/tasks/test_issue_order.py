"""Tests the order in which prompts are issued, on examples worked by hand; `test_choices` tests its effect on a run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey
from rollflow.tasks.rollout.issue_order import MOST_REMOVED, Issue, IssueOrder
from rollflow.tasks.rollout.limits import RolloutLimits

EXTRA: dict[str, Any] = {"redundant_groups": 3, "redundant_responses": 2}
TAIL: dict[str, Any] = {"tail_batching": True, "on_stale": "drop"}


def order_of(
    again: list[tuple[int, int]] | None = None, behind: list[tuple[int, int]] | None = None, **limits: Any
) -> IssueOrder:
    """Create an order with 2 groups of 4 per batch and batches 0 to 9; prompts below 100 were issued before."""
    every = RolloutLimits(0, 10, 2, 4, 1.0, 8, 1, 9, 1.0, **limits)
    return IssueOrder(every, Cursor((100,), (0,)), [GroupKey(*key) for key in again or []], behind or [])


def prompts(order: IssueOrder, batch: int, count: int) -> list[tuple[int, int]]:
    return [(issue.key.prompt, issue.key.attempt) for issue in (order.next_issue(batch) for _ in range(count))]


def left(order: IssueOrder, prompt: int, reason: DiscardReason = DiscardReason.STALE, attempt: int = 0) -> None:
    order.note_discard(Discard(GroupKey(prompt, attempt), reason, 0, 7))


def test_reissued_prompts_are_started_before_new_ones() -> None:
    order = order_of([(7, 1), (3, 2)])
    assert prompts(order, 0, 4) == [(7, 1), (3, 2), (100, 0), (101, 0)]
    assert order.take_issued() == (100, 101)  # the other prompts were issued before
    assert order.take_issued() == ()
    assert prompts(order, 0, 1) == [(102, 0)]
    assert order.take_issued() == (102,)


@pytest.mark.parametrize(
    ("reason", "now"),
    [
        (DiscardReason.STALE, [(100, 0)]),
        (DiscardReason.REDUNDANT, [(100, 0)]),
        (DiscardReason.FAILED, [(5, 1)]),
        (DiscardReason.CORRUPT, [(5, 1)]),
        (DiscardReason.FILTERED, [(100, 0)]),
    ],
)
def test_preempted_prompt_waits_for_the_next_policy_version(reason: DiscardReason, now: list[tuple[int, int]]) -> None:
    order = order_of()
    order.advance(4)
    left(order, 5, reason)
    order.advance(4)
    order.advance(3)
    assert prompts(order, 0, 1) == now
    order.advance(5)
    late = reason in (DiscardReason.STALE, DiscardReason.REDUNDANT)
    assert (prompts(order, 0, 1) == [(5, 1)]) == late
    order.advance(6)
    assert (5, 1) not in prompts(order, 0, 3)  # this attempt is issued only once


def test_new_epoch_waits_for_prompts_that_are_issued_again() -> None:
    """An epoch skips the questions that are solved when it starts. So it starts only when its first prompt is the next
    to be issued.
    """
    limits = RolloutLimits(0, 10, 2, 4, 1.0, 8, 1, 9, 1.0)
    order = IssueOrder(limits, Cursor((3,), (0,)), [GroupKey(1, 1)], epochs=[(0, 3)])
    assert order.find_missing_epoch() is None
    assert prompts(order, 0, 1) == [(1, 1)]
    assert order.find_missing_epoch() == (0, 3)
    order.note_epoch(0, 4)
    assert order.find_missing_epoch() is None
    assert prompts(order, 0, 1) == [(3, 0)]
    assert order.find_missing_epoch() == (0, 4)
    left(order, 3, DiscardReason.FAILED)
    assert order.find_missing_epoch() is None


def test_preempted_prompts_wait_for_policy_version_0() -> None:
    order = order_of()
    left(order, 5)
    order.advance(-1)
    assert prompts(order, 0, 1) == [(100, 0)]
    order.advance(0)
    assert prompts(order, 0, 1) == [(5, 1)]


def test_filtered_prompt_is_replaced_from_its_source() -> None:
    limits = RolloutLimits(0, 10, 2, 4, 1.0, 8, 1, 9, 1.0, shares=(0.5, 0.5))
    order = IssueOrder(limits, Cursor((10, 10), (0, 0)), [])
    assert prompts(order, 0, 2) == [(20, 0), (21, 0)]
    left(order, 21, DiscardReason.FILTERED)
    assert prompts(order, 0, 3) == [(23, 0), (22, 0), (25, 0)]


def test_source_is_closed_after_many_removed_prompts_in_a_row() -> None:
    limits = RolloutLimits(0, 10, 2, 4, 1.0, 8, 1, 9, 1.0, shares=(0.5, 0.5))
    order = IssueOrder(limits, Cursor((10, 10), (0, 0)), [])
    for prompt in range(1, 2 * MOST_REMOVED - 1, 2):
        order.note_removed(prompt, "it is broken")
    order.note_playable(1)  # the environment of another prompt of the source works
    for prompt in range(1, 2 * MOST_REMOVED - 1, 2):
        order.note_removed(prompt, "it is broken")
    assert prompts(order, 0, 2) == [(20, 0), (21, 0)]
    order.note_removed(1, "it is broken")
    assert prompts(order, 0, 2) == [(22, 0), (24, 0)]


def test_issued_prompt_includes_its_redundant_responses() -> None:
    plain = order_of([(7, 1)], **EXTRA)
    assert plain.next_issue(0) == Issue(GroupKey(7, 1), 6, awaited=True)
    assert plain.next_issue(0) == Issue(GroupKey(100, 0), 6, awaited=True)
    drops = order_of([(7, 1), (8, 1)], [(7, 3), (8, 2)], **EXTRA, on_stale="drop")
    assert drops.next_issue(0) == Issue(GroupKey(7, 1), 6, awaited=True)  # preempted three times
    assert drops.next_issue(0) == Issue(GroupKey(8, 1), 6, awaited=False)
    assert drops.next_issue(0) == Issue(GroupKey(100, 0), 6, awaited=False)
    assert [drops.count_extra_groups(batch) for batch in (0, 1, 9, 10)] == [3, 3, 3, 3]


def test_issue_is_marked_as_awaited_after_max_preemptions() -> None:
    order = order_of(on_stale="drop", max_preemptions=2)
    for attempt, awaited in ((0, False), (1, True), (2, True)):
        order.note_discard(Discard(GroupKey(5, attempt), DiscardReason.STALE, 0, 7))
        order.advance(attempt)
        assert order.next_issue(0) == Issue(GroupKey(5, attempt + 1), 4, awaited)
    order.forget_slowness([4, 5])
    left(order, 5, attempt=3)
    order.advance(5)
    assert order.next_issue(0) == Issue(GroupKey(5, 4), 4, awaited=False)  # once in a batch, preemptions count from 0


def test_prompt_without_generated_tokens_does_not_count_as_slow() -> None:
    order = order_of(**TAIL)
    order.note_discard(Discard(GroupKey(5, 0), DiscardReason.STALE, 0, 0))
    order.advance(0)
    assert prompts(order, 0, 1) == [(5, 1)]


# --- long rounds ---------------------------------------------------------------------------------------------

FIVE = [(number, 1) for number in range(5)]
SLOW = [(number, 1) for number in range(5)]


def test_slow_prompts_form_batches_while_enough_of_them_wait() -> None:
    order = order_of(FIVE, SLOW, **TAIL, **EXTRA)
    assert order.count_extra_groups(0) == 0
    assert [order.next_issue(0) for _ in range(2)] == [Issue(GroupKey(n, 1), 4, awaited=True) for n in (0, 1)]
    # A filtered prompt is replaced by one new prompt, without extra responses.
    assert order.next_issue(0) == Issue(GroupKey(100, 0), 4, awaited=False)
    assert [order.next_issue(1).key.prompt for _ in range(2)] == [2, 3]
    assert order.count_extra_groups(1) == 0
    assert order.count_extra_groups(2) == 3  # one prompt is left, too few for a long round
    assert order.next_issue(2) == Issue(GroupKey(101, 0), 6, awaited=False)
    # For an earlier batch, the round of the latest batch continues.
    assert order.next_issue(1) == Issue(GroupKey(102, 0), 6, awaited=False)
    assert order.count_extra_groups(1) == 3


def test_no_tail_batch_begins_before_the_first_policy_version() -> None:
    assert order_of(FIVE, SLOW, **TAIL, **EXTRA).count_extra_groups(-1) == 3


def test_tail_batch_contains_only_slow_prompts_until_its_end() -> None:
    order = order_of(FIVE[:1], SLOW, **TAIL, **EXTRA)
    assert order.next_issue(0) == Issue(GroupKey(100, 0), 6, awaited=False)
    left(order, 3)
    left(order, 4)
    assert order.count_extra_groups(-1) == order.count_extra_groups(0) == 3
    assert order.next_issue(0).responses == 6
    assert order.count_extra_groups(1) == 0
    assert prompts(order, 1, 3) == [(0, 1), (3, 1), (102, 0)]
    assert order.count_extra_groups(2) == 3


def test_preempted_prompts_are_issued_before_a_new_version() -> None:
    order = order_of(**TAIL)
    left(order, 3)
    left(order, 4)
    assert prompts(order, 0, 2) == [(3, 1), (4, 1)]


def test_slow_prompts_keep_their_order_without_tail_batching() -> None:
    order = order_of(FIVE, SLOW, **EXTRA, on_stale="drop", max_preemptions=1)
    assert order.count_extra_groups(0) == 3
    assert [order.next_issue(0) for _ in range(3)] == [Issue(GroupKey(n, 1), 6, awaited=True) for n in (0, 1, 2)]
    assert order.count_extra_groups(9) == 3


def test_last_batch_starts_no_redundant_prompts() -> None:
    order = order_of([(0, 1)], [(0, 1)], **TAIL, **EXTRA)
    assert [order.count_extra_groups(batch) for batch in (7, 8, 9, 10)] == [3, 3, 0, 0]
    assert order.next_issue(8).key.prompt == 100
    assert [order.next_issue(9) for _ in range(2)] == [
        Issue(GroupKey(0, 1), 4, awaited=True),
        Issue(GroupKey(101, 0), 4, awaited=False),
    ]


def test_batch_waits_for_every_prompt_if_on_stale_is_wait() -> None:
    order = order_of(tail_batching=True, on_stale="wait")
    assert order.next_issue(0).awaited
    left(order, 3)
    assert order.next_issue(9) == Issue(GroupKey(3, 1), 4, awaited=True)
    assert order.next_issue(9).awaited


@given(
    again=st.lists(st.integers(0, 99), max_size=4, unique=True),
    started=st.integers(0, 9),
    filtered=st.integers(0, 5),
    shares=st.sampled_from([(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1)]),
    count=st.integers(0, 12),
)
def test_next_prompts_are_listed_without_being_issued(
    again: list[int], started: int, filtered: int, shares: tuple[float, ...], count: int
) -> None:
    """Environments are reset in advance for the listed prompts; listing does not change the order of issue."""
    limits = RolloutLimits(0, 10, 2, 4, 1.0, 8, 1, 9, 1.0, shares=shares)
    cursor = Cursor((100,) * len(shares), (filtered,) * len(shares))
    looked, plain = (IssueOrder(limits, cursor, [GroupKey(prompt, 1) for prompt in again]) for _ in range(2))
    assert prompts(looked, 0, started) == prompts(plain, 0, started)
    listed = looked.list_next(count)
    assert listed == [prompt for prompt, _ in prompts(plain, 0, count)]
    assert listed == [prompt for prompt, _ in prompts(looked, 0, count)]
    assert looked.take_issued() == plain.take_issued()


def test_listed_prompts_end_before_an_epoch_that_has_not_started() -> None:
    limits = RolloutLimits(0, 10, 2, 4, 1.0, 8, 1, 9, 1.0)
    order = IssueOrder(limits, Cursor((100,), (0,)), [GroupKey(7, 1)], epochs=[(0, 102)])
    assert order.list_next(9) == [7, 100, 101]
