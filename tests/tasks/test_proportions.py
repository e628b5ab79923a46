"""Shares of correct responses: Wilson's interval, and the effective size of a sample with several responses per
prompt.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.tasks.statistics.proportions import PromptResult, effective_size, wilson_interval

RESULTS = st.lists(
    st.integers(1, 8).flatmap(lambda n: st.integers(0, n).map(lambda right: PromptResult(n, right))), min_size=1
)


@pytest.mark.parametrize(
    ("share", "size", "low", "high"),
    [(0.0, 10, 0.0, 0.27753), (0.5, 10, 0.23659, 0.76341), (1.0, 10, 0.72247, 1.0), (0.5, 0, 0.0, 1.0)],
)
def test_wilson_interval_matches_hand_examples(share: float, size: float, low: float, high: float) -> None:
    assert wilson_interval(share, size) == pytest.approx((low, high), abs=1e-5)


@given(share=st.floats(0, 1), size=st.floats(1, 1e6))
def test_wilson_interval_contains_the_share(share: float, size: float) -> None:
    low, high = wilson_interval(share, size)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    assert high - low >= sum(wilson_interval(share, 4 * size)[::-1]) - 2 * wilson_interval(share, 4 * size)[0]


@given(right=st.lists(st.booleans(), min_size=1))
def test_effective_size_counts_single_responses_once(right: list[bool]) -> None:
    assert effective_size([PromptResult(1, int(one)) for one in right]) == pytest.approx(len(right))


@given(right=st.lists(st.booleans(), min_size=1), samples=st.integers(1, 16))
def test_effective_size_counts_equal_responses_as_one(right: list[bool], samples: int) -> None:
    results = [PromptResult(samples, samples * one) for one in right]
    assert effective_size(results) == pytest.approx(len(right))


@given(results=RESULTS)
def test_effective_size_is_at_most_the_number_of_responses(results: list[PromptResult]) -> None:
    assert 0 < effective_size(results) <= sum(one.responses for one in results) + 1e-9


@given(samples=st.integers(1, 16), prompts=st.integers(1, 20), data=st.data())
def test_effective_size_is_at_least_the_number_of_prompts(samples: int, prompts: int, data: st.DataObject) -> None:
    right = data.draw(st.lists(st.integers(0, samples), min_size=prompts, max_size=prompts))
    assert effective_size([PromptResult(samples, one) for one in right]) >= prompts - 1e-9


def test_effective_size_matches_a_hand_example() -> None:
    """Two prompts with 2 responses, 2 and 1 right: p = 3/4, squares 1/4 + 1/4, size 3/16 x 16 / (1/2) = 6, cut to 4."""
    assert effective_size([PromptResult(2, 2), PromptResult(2, 1)]) == 4
    assert effective_size([PromptResult(2, 2), PromptResult(2, 0)]) == 2
