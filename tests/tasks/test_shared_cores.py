"""Tests simulated engines and a learner that share CPU cores: step times are compared with hand calculations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.config import EvaluationConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.alphas import choose_alpha, compare_alphas, spread_learner
from rollflow.tasks.simulation.hardware import Hardware, LearnerHardware
from rollflow.tasks.simulation.planner import TOLERANCE
from rollflow.tasks.simulation.world import simulate

SLICE = 0.02  # largest relative error of a train step, which is simulated in 64 slices


def recipe(alpha: float) -> RunConfig:
    """Return a recipe with 16 responses per step."""
    own: dict[str, Any] = {"policy": PolicyConfig(path="x"), "evaluation": EvaluationConfig(every=0)}
    return RunConfig(groups=8, group_size=2, async_ratio=alpha, versions=30, **own)


def hardware(rollout: float, train: float, share: float) -> Hardware:
    """Return one engine that alone takes `rollout` seconds for the 16 responses of a step, all of one length."""
    return Hardware.model_validate(
        {
            "engines": {"count": 1, "max_concurrent_requests": 16, "seconds_per_token": rollout / 100},
            "responses": {"median": 100, "sigma": 0.0, "cap": 100},
            "learner": {"seconds_per_version": train, "shared_speed": share},
        }
    )


def step(alpha: float, rollout: float, train: float, share: float) -> float:
    return simulate(recipe(alpha), hardware(rollout, train, share), versions=16).figures.step_seconds


def test_step_on_shared_cores_matches_a_hand_example() -> None:
    """Alone, a rollout takes 8 s and training 2 s. One after the other, they take 10 s; at the same time on separate
    cores, 8 s. On shared cores at half speed, training takes 4 s, in which the engine does 2 s of its work. The step
    takes 4 + 6 s.
    """
    assert step(0, 8.0, 2.0, 1.0) == pytest.approx(10.0, rel=SLICE)
    assert step(2, 8.0, 2.0, 1.0) == pytest.approx(8.0, rel=SLICE)
    assert step(0, 8.0, 2.0, 0.5) == pytest.approx(10.0, rel=SLICE)
    assert step(2, 8.0, 2.0, 0.5) == pytest.approx(10.0, rel=SLICE)


@settings(max_examples=6, deadline=None)
@given(st.floats(0.5, 20.0), st.floats(0.5, 20.0), st.floats(0.5, 1.0), st.sampled_from([1.0, 2.0]))
def test_step_on_shared_cores_lies_between_two_bounds(rollout: float, train: float, share: float, alpha: float) -> None:
    """Sharing cores is never faster than separate cores. At half speed or more, sharing is never slower than taking
    turns.
    """
    shared = step(alpha, rollout, train, share)
    assert shared >= step(alpha, rollout, train, 1.0) * (1 - SLICE)
    assert shared <= step(0, rollout, train, share) * (1 + SLICE)


@settings(max_examples=4, deadline=None)
@given(st.floats(0.5, 20.0), st.floats(0.5, 20.0), st.floats(0.4, 1.0), st.floats(1.0, 4.0))
def test_smallest_of_the_fastest_alphas_is_chosen(rollout: float, train: float, share: float, spread: float) -> None:
    outcomes = compare_alphas(recipe(2.0), hardware(rollout, train, share), spread=spread)
    chosen, best = choose_alpha(outcomes), min(one.step_seconds for one in outcomes)
    assert [one.async_ratio for one in outcomes] == [0.0, 1.0, 2.0]
    assert chosen.step_seconds * (1 - TOLERANCE) <= best
    smaller = [one for one in outcomes if one.async_ratio < chosen.async_ratio]
    assert all(one.step_seconds * (1 - TOLERANCE) > best for one in smaller)
    assert max(chosen.figures.staleness) <= chosen.async_ratio


def test_no_alpha_above_zero_is_chosen_on_fully_shared_cores() -> None:
    """At alpha 0, training uses twice the cores and takes half as long. At half speed, asynchrony gains nothing."""
    outcomes = compare_alphas(recipe(2.0), hardware(8.0, 4.0, 0.5), spread=2.0)
    assert choose_alpha(outcomes).async_ratio == 0
    own = compare_alphas(recipe(2.0), hardware(8.0, 4.0, 1.0), spread=1.0)
    assert choose_alpha(own).async_ratio == 1


def test_learner_with_more_cores_is_faster_in_every_part() -> None:
    learner = LearnerHardware(seconds_per_version=4.0, seconds_per_trajectory=2.0, seconds_per_token=1.0, measured=(8,))
    faster = spread_learner(learner, 2.0)
    found = faster.seconds_per_version, faster.seconds_per_trajectory, faster.seconds_per_token, *faster.measured
    assert found == (2.0, 1.0, 0.5, 4.0)
