"""Tests of admission, which decides how many prompts may start, against a simple count and hand calculations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.tasks.rollout.admission import (
    AdmissionDecision,
    AdmissionInputs,
    BatchesToForm,
    compute_allowance,
    decide_admission,
    next_batch,
)
from rollflow.tasks.rollout.limits import RolloutLimits

PARTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.75])


@st.composite
def dues(draw: st.DrawFn) -> BatchesToForm:
    """Draw the due batches at some moment of a run."""
    number = draw(st.integers(0, 6))
    missing = draw(st.sets(st.integers(0, max(0, number - 1)), max_size=number))
    return BatchesToForm(number, tuple(sorted(missing)), draw(st.integers(max(0, number - 2), 9)))


@given(due=dues())
def test_lost_batches_are_formed_before_new_ones(due: BatchesToForm) -> None:
    order = [*due.missing, *range(due.number, due.last)]
    assert due.count == len(order)
    assert [due.at(place) for place in range(len(order))] == order
    if order:
        assert due.first == order[0]
        after = due.after_first()
        assert [after.at(place) for place in range(after.count)] == order[1:]
        assert after.last == due.last


@given(version=st.integers(-1, 6), due=dues(), outstanding=st.integers(0, 9), groups=st.integers(1, 5), ahead=PARTS)
def test_async_ratio_limits_the_prompts_that_may_start(
    version: int, due: BatchesToForm, outstanding: int, groups: int, ahead: float
) -> None:
    reach = groups * (version + 1 + ahead)  # groups of all batches, formed or not
    numbered = [(place, place // groups) for place in range(math.floor(reach))]
    allowed = sum(batch >= due.number or batch in due.missing for _, batch in numbered)
    found = compute_allowance(version, outstanding, number=due.number, missing=due.missing, groups=groups, ahead=ahead)
    assert found == (allowed - outstanding if version >= 0 else 0)


# --- decisions: 4 groups a batch, batches 0 to 9, async_ratio = 1, 8 groups at a time in 16 slots ----------------

LIMITS = RolloutLimits(0, 10, 4, 2, 1.0, 8, 1, 9, 1.0)
SUPPLY = AdmissionInputs(version=2, due=BatchesToForm(3, (), 10), running=5, outstanding=1, generating=10, slots=16)


def rooms(extra: int = 0, limits: dict[str, Any] | None = None, **supply: Any) -> AdmissionDecision:
    return decide_admission(replace(SUPPLY, **supply), replace(LIMITS, **(limits or {})), extra)


def test_number_of_allowed_prompts_matches_a_hand_calculation() -> None:
    """Batch 3 under version 2: 4 * (2 + 1 + 1) groups may be started in all, 12 are formed, 1 is outstanding."""
    assert rooms() == AdmissionDecision(batch=3, fresh=3, wanted=27, free=True)


def test_async_ratio_increased_by_one_allows_one_more_batch() -> None:
    assert rooms(limits={"async_ratio": 2.0}).fresh == 7
    assert rooms(limits={"async_ratio": 0.0}).fresh == -1  # batch 3 needs groups of version 3
    assert rooms(limits={"async_ratio": 2.0, "max_batches_ahead": 1.0}).fresh == 3


def test_fractional_async_ratio_allows_part_of_another_batch() -> None:
    half = {"async_ratio": 1.5, "on_stale": "drop"}
    assert rooms(limits=half).fresh == 5  # half a batch more
    assert rooms(limits=half | {"on_stale": "wait"}).fresh == 3
    # A new group would be for batch 4, and would be too old.
    assert rooms(limits=half, due=BatchesToForm(4, (), 10), outstanding=0).fresh == 0


def test_prompt_too_late_for_its_batch_is_not_started() -> None:
    """At version 0, async_ratio = 0.5 allows 4 * 1.5 groups. After batch 0, batch 1 needs a version above 0."""
    fraction = {"async_ratio": 0.5, "on_stale": "drop"}
    assert rooms(limits=fraction, version=0, due=BatchesToForm(0, (), 10), outstanding=0).fresh == 6
    assert rooms(limits=fraction, version=0, due=BatchesToForm(1, (), 10), outstanding=0).fresh == 0
    # A negative number is not raised to 0.
    assert rooms(limits=fraction, version=0, due=BatchesToForm(1, (), 10), outstanding=3).fresh == -1
    assert rooms(limits=fraction, version=1, due=BatchesToForm(1, (), 10), outstanding=0).fresh == 6
    # A group is just fresh enough.
    assert rooms(limits={"async_ratio": 1.0}, version=0, due=BatchesToForm(1, (), 10), outstanding=0).fresh == 4


def test_prompts_for_a_lost_batch_are_admitted_separately() -> None:
    assert rooms(due=BatchesToForm(3, (1,), 10)) == AdmissionDecision(batch=1, fresh=7, wanted=31, free=True)


def test_redundant_prompts_are_started_with_the_next_batch() -> None:
    assert rooms(extra=2) == AdmissionDecision(batch=3, fresh=5, wanted=29, free=True)
    formed = rooms(extra=2, due=BatchesToForm(4, (), 10), outstanding=0)  # this version's batches are formed
    assert formed == AdmissionDecision(batch=3, fresh=0, wanted=24, free=True)
    ahead = rooms(
        extra=2, limits={"async_ratio": 2.0, "max_batches_ahead": 1.0}, due=BatchesToForm(4, (), 10), outstanding=0
    )
    assert ahead == AdmissionDecision(
        batch=3, fresh=0, wanted=24, free=True
    )  # limited by `max_batches_ahead`; async_ratio would allow more


def test_last_batches_start_no_redundant_prompts() -> None:
    assert rooms(due=BatchesToForm(9, (), 10), version=9).wanted == 3
    assert rooms(due=BatchesToForm(9, (1,), 10), version=9).wanted == 7
    assert rooms(due=BatchesToForm(10, (), 10), version=9, outstanding=0).wanted == 0


def test_no_prompt_is_started_before_the_first_policy_version() -> None:
    assert rooms(extra=2, version=-1, due=BatchesToForm(0, (), 10), outstanding=0) == AdmissionDecision(0, 0, 0, True)
    assert rooms(extra=2, version=0, due=BatchesToForm(0, (), 10), outstanding=0) == AdmissionDecision(0, 10, 42, True)


@pytest.mark.parametrize(
    ("supply", "free"),
    [
        ({}, True),
        ({"running": 7}, True),
        ({"running": 8}, False),
        ({"generating": 15}, True),
        ({"generating": 16}, False),
        ({"generating": 16, "slots": math.inf}, True),
        ({"running": 8, "generating": 16}, False),
    ],
)
def test_prompt_is_started_if_an_engine_has_free_slots(supply: dict[str, Any], free: bool) -> None:
    assert rooms(**supply).free == free


@pytest.mark.parametrize(
    ("fresh", "wanted", "free", "opens", "is_held"),
    [
        (1, 1, True, True, False),
        (1, 1, False, False, False),
        (0, 1, True, False, True),
        (-2, 1, True, False, True),
        (0, 1, False, False, False),
        (1, 0, True, False, False),
        (0, 0, True, False, False),
        (2, 2, True, True, False),
    ],
)
def test_admission_reports_if_only_async_ratio_keeps_slots_idle(
    fresh: int, wanted: int, free: bool, opens: bool, is_held: bool
) -> None:
    found = AdmissionDecision(0, fresh, wanted, free)
    assert (found.opens, found.is_held) == (opens, is_held)


@pytest.mark.parametrize(
    ("supply", "limits", "batch"),
    [
        ({}, {}, 3),
        ({"outstanding": 3}, {}, 3),
        ({"outstanding": 4}, {}, 3),  # async_ratio allows no later batch
        ({"outstanding": 4}, {"async_ratio": 2.0}, 4),
        ({"outstanding": 4}, {"async_ratio": 2.0, "max_batches_ahead": 1.5, "on_stale": "drop"}, 3),
        ({"due": BatchesToForm(3, (1,), 10)}, {}, 1),
        ({"due": BatchesToForm(3, (1,), 10), "outstanding": 4}, {}, 3),
        ({"version": -1, "due": BatchesToForm(0, (), 10)}, {}, 0),
        ({"version": -1, "due": BatchesToForm(0, (), 10)}, {"async_ratio": 0.0}, -1),
    ],
)
def test_next_started_prompt_belongs_to_the_expected_batch(
    supply: dict[str, Any], limits: dict[str, Any], batch: int
) -> None:
    assert next_batch(replace(SUPPLY, **supply), replace(LIMITS, **limits)) == batch
    assert rooms(limits=limits, **supply).batch == batch


@pytest.mark.parametrize(
    ("unscored", "most", "scores"), [(0, None, True), (999, None, True), (4, 5, True), (5, 5, False), (6, 5, False)]
)
def test_no_prompt_starts_while_max_unscored_responses_wait(unscored: int, most: int | None, scores: bool) -> None:
    room = rooms(unscored=unscored, limits={"max_unscored": most})
    assert (room.scores, room.opens, room.is_backlogged) == (scores, scores, not scores)
    assert not room.is_held


@given(
    version=st.integers(0, 6),
    due=dues(),
    outstanding=st.integers(0, 9),
    generating=st.integers(0, 20),
    unscored=st.integers(0, 9),
    most=st.none() | st.integers(1, 9),
    extra=st.integers(0, 3),
)
def test_limit_on_unscored_responses_only_stops_new_prompts(
    version: int,
    due: BatchesToForm,
    outstanding: int,
    generating: int,
    unscored: int,
    most: int | None,
    extra: int,
) -> None:
    supply = {"version": version, "due": due, "outstanding": outstanding, "generating": generating}
    room = rooms(extra, {"max_unscored": most}, **supply, unscored=unscored)
    unbounded = rooms(extra, **supply)
    assert replace(room, scores=True) == unbounded  # no other number of the decision changes
    assert room.opens == (unbounded.opens and (most is None or unscored < most))
    assert sum((room.opens, room.is_held, room.is_backlogged)) <= 1
