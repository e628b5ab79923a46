"""Tests the scheduler's limits, which are read from the config, and its filter of groups."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.rollout.config import FilterConfig, RolloutConfig
from rollflow.tasks.rollout.limits import JudgingLimits, RolloutLimits, filter_reason
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.limits import build_limits


def test_scheduler_limits_contain_every_rollout_key() -> None:
    """All values differ, so that a value in a wrong field is noticed."""
    rollout = RolloutConfig(
        max_inflight_groups=11,
        max_batches_ahead=1.5,
        redundant_groups=12,
        redundant_responses=13,
        tail_batching=True,
        max_preemptions=14,
        on_stale="drop",
        staleness_from="oldest-token",
        filter=FilterConfig(min_mean=0.25),
        attempts=15,
    )
    config = RunConfig(
        seed=1,
        versions=2,
        groups=3,
        group_size=4,
        async_ratio=2.5,
        policy=PolicyConfig(path="x"),
        engine=TimedEngineConfig(max_concurrent_requests=5, replicas=6, max_new_tokens=7, temperature=0.5),
        prompts=tuple(ReasoningGymPrompts(family="basic_arithmetic", share=share) for share in (0.75, 0.125)),
        rollout=rollout,
    )
    expected = RolloutLimits(
        seed=1,
        batches=2,
        groups=3,
        group_size=4,
        async_ratio=2.5,
        max_inflight_groups=11,
        attempts=15,
        max_new_tokens=7,
        temperature=0.5,
        slots=30,
        max_batches_ahead=1.5,
        redundant_groups=12,
        redundant_responses=13,
        tail_batching=True,
        max_preemptions=14,
        on_stale="drop",
        batch_order="finished",
        staleness_from="oldest-token",
        filter=rollout.filter,
        shares=(0.75, 0.125),
        judging={"": JudgingLimits(tries=3, max_unjudged=20)},
    )
    assert build_limits(config) == expected
    again = config.model_copy(update={"rollout": RolloutConfig(batch_order="started")})
    assert build_limits(again) == RolloutLimits(
        1,
        2,
        3,
        4,
        2.5,
        30,
        3,
        7,
        0.5,
        slots=30,
        batch_order="started",
        shares=(0.75, 0.125),
        judging=expected.judging,
    )


LIMITS = RolloutLimits(0, 10, 4, 2, 2.5, 8, 1, 9, 1.0)


@pytest.mark.parametrize(
    ("choices", "lead"),
    [
        ({}, 2),  # alpha is rounded down unless old groups are dropped
        ({"on_stale": "drop"}, 2.5),
        ({"max_batches_ahead": 0.5}, 0.5),
        ({"max_batches_ahead": 0.5, "on_stale": "drop"}, 0.5),
        ({"max_batches_ahead": 2.25}, 2),
        ({"max_batches_ahead": 2.25, "on_stale": "drop"}, 2.25),
        ({"max_batches_ahead": 0.0}, 0),
        ({"max_batches_ahead": 0.0, "on_stale": "drop"}, 0),
        ({"async_ratio": 0.75}, 0),
        ({"async_ratio": 0.75, "on_stale": "drop"}, 0.75),
    ],
)
def test_alpha_and_max_batches_ahead_limit_the_batches_ahead(choices: dict[str, Any], lead: float) -> None:
    assert replace(LIMITS, **choices).lead == lead


@pytest.mark.parametrize(
    ("choices", "times"),
    [
        ({}, 3),
        ({"tail_batching": True}, 1),
        ({"max_preemptions": 5}, 5),
        ({"tail_batching": True, "max_preemptions": 5}, 5),
    ],
)
def test_key_max_preemptions_has_its_documented_default(choices: dict[str, Any], times: int) -> None:
    assert replace(LIMITS, **choices).awaited_after == times


@pytest.mark.parametrize(
    ("limits", "rewards", "why"),
    [
        (FilterConfig(min_mean=0.5), [0.0, 1.0], "mean reward at or below 0.5"),
        (FilterConfig(min_mean=0.5), [0.5, 1.0], None),
        (FilterConfig(max_mean=0.5), [0.0, 1.0], "mean reward at or above 0.5"),
        (FilterConfig(max_mean=0.5), [0.0, 0.5], None),
        (FilterConfig(min_mean=0.5, max_mean=0.5), [0.5], "mean reward at or below 0.5"),  # the first reason that holds
        (FilterConfig(min_std=0.0), [0.25, 0.25], "rewards spread by 0 or less"),
        (FilterConfig(min_std=0.0), [0.1 + 0.2, 0.3], "rewards spread by 0 or less"),  # equal once stored as float32
        (FilterConfig(min_std=0.0), [0.25, 0.5], None),
        (FilterConfig(min_std=0.25), [0.0, 0.5], "rewards spread by 0.25 or less"),  # the population standard deviation
        (FilterConfig(min_mean=0.5), [0.0, 0.0], "mean reward at or below 0.5"),
        (FilterConfig(max_mean=0.5), [1.0, 1.0], "mean reward at or above 0.5"),
        (FilterConfig(min_std=0.5), [0.25, 0.5], "rewards spread by 0.5 or less"),
        (FilterConfig(min_mean=0.0, max_mean=1.0), [0.0, 1.0], None),
        (FilterConfig(), [1.0, 1.0], None),
        (None, [1.0, 1.0], None),
    ],
)
def test_filter_names_the_reason_for_removing_a_group(
    limits: FilterConfig | None, rewards: list[float], why: str | None
) -> None:
    assert filter_reason(limits, rewards) == why


@given(
    rewards=st.lists(st.sampled_from(range(21)).map(lambda number: number / 20), min_size=1, max_size=8),
    limit=st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.75, 0.8, 0.9]),
)
def test_filter_decides_the_same_from_stored_rewards(rewards: list[float], limit: float) -> None:
    """The audit reads rewards that are stored as float32; it must decide as the scheduler did."""
    stored = array("f", rewards).tolist()
    for limits in (FilterConfig(min_mean=limit), FilterConfig(max_mean=limit)):
        assert filter_reason(limits, rewards) == filter_reason(limits, stored)
        assert filter_reason(limits, [limit] * len(rewards)) is not None, "the mean is at the limit"
