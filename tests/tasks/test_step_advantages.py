"""Tests advantages from rewards of tokens and steps, against hand calculations and, for random batches, against the
papers' formulas.

The reference calculation uses plain Python floats, one token and one response at a time. In the hand calculations, a
row is the reward of a response and the rewards of its tokens; None stands for a token without a reward.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Branch, StopReason, Trajectory
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.learners.forward.pre_update import compute_targets
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import EPSILON, TINY
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.objectives.token_rewards import check_token_rewards
from rollflow.testing.learners import batch_of

Row = tuple[float, list[float | None]]  # reward of the response, and the rewards of its tokens
NUMBER = st.integers(-8, 8).map(lambda quarters: quarters / 4)
ROWS = st.tuples(NUMBER, st.lists(st.none() | NUMBER, max_size=4))
REINFORCE, PLUS, GRPO, DR_GRPO, RLOO = (
    Advantage.model_validate(part)
    for part in (
        {"baseline": "none", "scale": "none"},
        {"baseline": "batch", "scale": "batch"},
        {},
        {"scale": "none"},
        {"baseline": "leave-one-out", "scale": "none"},
    )
)


def data_of(groups: list[list[Row]], branch: bool = False) -> BatchRows:
    """Return a batch; with `branch`, the last row of each group branches off the first row."""
    made = []
    for group in groups:
        rows = [build_row(number, *row) for number, row in enumerate(group)]
        made.append([*rows[:-1], replace(rows[-1], branch=Branch(0, 2))] if branch else rows)
    return BatchRows.of(batch_of(*made))


def build_row(number: int, reward: float, values: list[float | None]) -> Trajectory:
    mask = (False, False, *(True for _ in values))
    quiet, versions = (0.0,) * len(mask), tuple(0 if one else -1 for one in mask)
    rewards = [math.nan] * 2 + [math.nan if value is None else value for value in values]
    given = Float32s.of(rewards) if any(value is not None for value in values) else None
    tokens = (5,) * len(mask)
    return Trajectory(number, 0, tokens, mask, quiet, versions, reward, "", StopReason.STOP, token_rewards=given)


def found_by(part: Advantage, *groups: list[Row], branch: bool = False) -> list[float]:
    data = data_of([*groups], branch)
    if data.token_rewards is None:
        data = replace(data, token_rewards=torch.full((len(data.chosen),), math.nan).numpy())
    return compute_targets(part, replace(data, rewards=data.rewards.astype(float)), 10).advantage_B.tolist()


# --- hand calculations ----------------------------------------------------------------------------------------------


def test_reinforce_credits_each_token_with_later_rewards() -> None:
    assert found_by(REINFORCE, [(1.0, [0.5, None, -2.0, None])]) == [-0.5, -1.0, -1.0, 1.0]


def test_grpo_process_supervision_matches_a_hand_calculation() -> None:
    """The two responses have the step rewards 1, 0 and 1, 1, 0. Their mean is 3/5, the sum of squared distances is 2 x
    0.36 + 3 x 0.16 = 1.2, and the standard deviation is sqrt(0.3).
    """
    deviation = math.sqrt(1.2 / 4) + EPSILON
    up, down = 0.4 / deviation, -0.6 / deviation
    expected = [up + down, up + down, down, up + up + down, up + down, down]
    found = found_by(GRPO, [(0.0, [None, 1.0, 0.0]), (0.0, [1.0, 1.0, 0.0])])
    assert found == pytest.approx(expected, abs=1e-12)


def test_grpo_adds_outcome_and_process_advantages() -> None:
    """The response rewards 1 and 0 have distances of 1/2 from their mean, and standard deviation sqrt(1/2). The step
    rewards 3 and 1 have standard deviation sqrt(2).
    """
    outcome, step = 0.5 / (math.sqrt(0.5) + EPSILON), 1.0 / (math.sqrt(2) + EPSILON)
    found = found_by(GRPO, [(1.0, [3.0, None]), (0.0, [None, 1.0])])
    assert found == pytest.approx([outcome + step, outcome, -outcome - step, -outcome - step], abs=1e-12)
    found = found_by(DR_GRPO, [(1.0, [3.0, None]), (0.0, [None, 1.0])])
    assert found == pytest.approx([0.5 + 1, 0.5, -0.5 - 1, -0.5 - 1], abs=1e-12)


def test_rloo_subtracts_the_mean_step_of_other_responses() -> None:
    """The mean step rewards of the responses are 2, 5 and none. The baseline of the first response is 5, the baseline
    of the second response is 2, and the third response has no steps.
    """
    found = found_by(RLOO, [(3.0, [1.0, 3.0]), (0.0, [5.0]), (0.0, [None])])
    assert found == pytest.approx([3 + (1 - 5) + (3 - 5), 3 + (3 - 5), -1.5 + (5 - 2), -1.5], abs=1e-12)


def test_rloo_ignores_steps_that_no_other_response_has() -> None:
    assert found_by(RLOO, [(1.0, [1.0, 3.0]), (0.0, [None])]) == [1.0, 1.0, -1.0]


def test_reinforce_plus_plus_whitens_the_returns() -> None:
    """The returns are 3, 2 and 1. Their mean is 2, and their standard deviation is 1."""
    assert found_by(PLUS, [(2.0, [1.0, None]), (1.0, [None])]) == pytest.approx([1, 0, -1], abs=1e-6)


def test_steps_of_a_branch_count_for_the_parent_episode() -> None:
    """The step rewards are 3 and 5 in the first episode, and 1 in the second episode. Their mean is 3."""
    found = found_by(DR_GRPO, [(0.0, [3.0]), (0.0, [1.0]), (0.0, [5.0])], branch=True)
    assert found == [2.0, -2.0, 2.0]


def test_equal_steps_give_advantage_zero() -> None:
    for part in (GRPO, DR_GRPO, RLOO):
        assert found_by(part, [(0.1, [0.1, 0.1, 0.1]), (0.1, [0.1])]) == [0.0] * 4


def test_critic_gets_the_reward_of_a_token_at_that_token() -> None:
    """With gamma = lambda = 1 and critic values of zero, the advantage is the return from the token on, minus the KL
    penalties.
    """
    part = Advantage(baseline="critic", scale="none")
    data = data_of([[(1.0, [0.5, None, -2.0])]])
    found = compute_targets(part, data, 10, price_B=torch.full((3,), 0.25), values_B=torch.zeros(3))
    assert found.advantage_B.tolist() == [-1.25, -1.5, -1.25]
    assert found.returns_B is not None
    assert found.returns_B.dtype == torch.float64


def test_without_token_rewards_advantages_are_per_response() -> None:
    """Without steps, each estimator gives every token the advantage of its response."""
    group: list[Row] = [(1.0, [None, None]), (0.0, [None]), (0.5, [None] * 3)]
    for part in (REINFORCE, PLUS, GRPO, DR_GRPO, RLOO):
        plain = compute_targets(part, data_of([group]), 10).advantage_B.tolist()
        assert found_by(part, group) == pytest.approx(plain, abs=1e-6)


# --- against the formulas -------------------------------------------------------------------------------------------


def expected_of(part: Advantage, groups: list[list[Row]]) -> list[list[float]]:
    """Compute the advantages of each response's tokens by the formulas, before the scaling by `batch` or `whiten`."""
    found = []
    for group in groups:
        steps = [[value for value in values if value is not None] for _, values in group]
        every = [value for one in steps for value in one]
        for number, (reward, values) in enumerate(group):
            others = [fmean(one) for place, one in enumerate(steps) if one and place != number]
            outcome, base, divisor = reward, 0.0, 1.0
            if part.baseline == "group":
                outcome, base = reward - fmean(r for r, _ in group), fmean(every) if every else 0.0
            elif part.baseline == "leave-one-out":
                rest = [r for place, (r, _) in enumerate(group) if place != number]
                outcome = reward - fmean(rest) if rest else 0.0
                base = fmean(others) if others else math.nan
            if part.scale == "group":
                outcome /= (stdev([r for r, _ in group]) if len(group) > 1 else 0.0) + EPSILON
                divisor = (stdev(every) if len(every) > 1 else 0.0) + EPSILON
            row, following = [], 0.0
            for value in reversed(values):
                centred = 0.0 if value is None or math.isnan(base) else (value - base) / divisor
                following += centred
                row.append(outcome + following)
            found.append(row[::-1])
    return found


def scaled_of(part: Advantage, rows: list[list[float]]) -> list[float]:
    flat = [value for row in rows for value in row]
    mean = fmean(flat) if flat and (part.baseline == "batch" or part.scale == "whiten") else 0.0
    deviation = math.sqrt(stdev(flat) ** 2 + TINY) if part.scale in ("batch", "whiten") else 1.0
    return [(value - mean) / deviation for value in flat]


PARTS = [
    Advantage.model_validate({"baseline": baseline, "scale": scale})
    for baseline, scales in (
        ("none", ("none", "whiten")),
        ("batch", ("none", "batch", "whiten")),
        ("group", ("none", "group", "batch", "whiten")),
        ("leave-one-out", ("none", "group", "batch", "whiten")),
    )
    for scale in scales
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.baseline}-{part.scale}")
@given(groups=st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_step_advantages_equal_a_direct_formula(part: Advantage, groups: list[list[Row]]) -> None:
    rows = expected_of(part, groups)
    flat = [value for row in rows for value in row]
    if part.scale in ("batch", "whiten") and (len(flat) < 2 or max(flat) - min(flat) < 1e-2):
        return  # the tested code keeps the standard deviation above zero, which the formula does not
    assert found_by(part, *groups) == pytest.approx(scaled_of(part, rows), abs=1e-9)


# --- an objective that cannot use token rewards ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", PRESETS)
def test_token_rewards_are_refused_only_with_gspo(kind: str) -> None:
    objective = PartsObjective.model_validate({"kind": kind})
    if kind != "gspo":
        check_token_rewards(objective)
        return
    with pytest.raises(ConfigError, match=r"train.objective.ratio.level = 'geometric': the scorer gives values to tok"):
        check_token_rewards(objective)
