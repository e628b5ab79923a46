"""Advantages, losses and packing against values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Ending, GroupKey, Trajectory, TrajectoryGroup
from rollflow.tasks.objectives.advantages import EPSILON, group_advantages
from rollflow.tasks.objectives.losses import decoupled_ppo, grpo, row_weights
from rollflow.tasks.objectives.packing import Rows, micro_batches

F64 = torch.float64


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=F64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    found = group_advantages(rewards, groups, normalize=True)
    # group 0: mean 1/3, sample deviation sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3)
    deviation = math.sqrt(1 / 3) + EPSILON
    expected = [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0.0, 0.0, 0.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    plain = group_advantages(rewards, groups, normalize=False)
    assert plain.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0], abs=1e-12)


def test_groups_need_not_stand_together() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0], dtype=F64)
    found = group_advantages(rewards, torch.tensor([0, 1, 0, 1]), normalize=False)
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),  # inside: -(r A), and d(r A)/dlogp = r A
        (1.5, 2.0, -2.56, 0.0, True),  # above 1 + 0.28 with A > 0: held at 1.28 A
        (0.5, 2.0, -1.0, -1.0, False),  # below with A > 0: not held (min takes r A)
        (0.5, -2.0, 1.6, 0.0, True),  # below 1 - 0.2 with A < 0: held at 0.8 A
        (1.5, -2.0, 3.0, 3.0, False),  # above with A < 0: not held
    ],
)
def test_grpo_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    logp = torch.tensor([math.log(0.3 * ratio)], dtype=F64, requires_grad=True)
    behaviour = torch.tensor([math.log(0.3)], dtype=F64)
    found = grpo(logp, behaviour, torch.tensor([advantage], dtype=F64), clip_low=0.2, clip_high=0.28)
    found.loss_M.sum().backward()
    assert found.loss_M.item() == pytest.approx(loss, abs=1e-12)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert found.clipped_M.item() is clipped


def test_decoupled_ppo_by_hand() -> None:
    """pi = 0.36, pi_p = 0.3, mu = 0.2: q = 1.2, weight 1.5; with A = 2 the loss is -1.5 x 1.2 x 2 = -3.6."""
    logp = torch.tensor([math.log(0.36), math.log(0.36), math.log(0.36)], dtype=F64, requires_grad=True)
    proximal = torch.tensor([math.log(0.3), math.log(0.2), math.log(0.3)], dtype=F64)
    behaviour = torch.tensor([math.log(0.2), math.log(0.2), math.log(0.01)], dtype=F64)
    advantage = torch.full((3,), 2.0, dtype=F64)
    found = decoupled_ppo(logp, proximal, behaviour, advantage, clip_low=0.2, clip_high=0.28, weight_cap=5.0)
    # second: q = 1.8 is held at 1.28, weight 1; third: weight 30 is capped at 5
    assert found.loss_M.tolist() == pytest.approx([-3.6, -2.56, -12.0], abs=1e-12)
    assert found.clipped_M.tolist() == [False, True, True]
    found.loss_M.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-3.6, 0.0, -12.0], abs=1e-12)


def test_decoupled_ppo_on_policy_is_grpo() -> None:
    logp = torch.randn(50, dtype=F64) - 2
    behaviour, advantage = logp + 0.3 * torch.randn(50, dtype=F64), torch.randn(50, dtype=F64)
    a = grpo(logp, behaviour, advantage, clip_low=0.2, clip_high=0.28)
    b = decoupled_ppo(logp, behaviour, behaviour, advantage, clip_low=0.2, clip_high=0.28, weight_cap=5.0)
    torch.testing.assert_close(a.loss_M, b.loss_M)


def test_aggregation_by_hand() -> None:
    tokens = torch.tensor([1, 3])
    assert row_weights(tokens, "token-mean").tolist() == [0.25, 0.25]
    assert row_weights(tokens, "sequence-mean").tolist() == pytest.approx([0.5, 1 / 6])


def trajectory(prompt: list[int], response: list[int], sample: int = 0, reward: float = 0.0) -> Trajectory:
    tokens = (*prompt, *response)
    mask = (False,) * len(prompt) + (True,) * len(response)
    logprobs = (0.0,) * len(prompt) + tuple(-0.5 - 0.01 * t for t in response)
    versions = (-1,) * len(prompt) + (0,) * len(response)
    return Trajectory(sample, 0, tokens, mask, logprobs, versions, reward, "", Ending.STOP)


def batch_of(*groups: list[Trajectory]) -> TrajectoryBatch:
    made = [TrajectoryGroup(GroupKey(i, 0), f"p{i}", "d", tuple(g)) for i, g in enumerate(groups)]
    return TrajectoryBatch.from_groups(made)


def test_packing_pairs_every_masked_token_with_its_predictor() -> None:
    batch = batch_of([trajectory([5, 6], [7]), trajectory([5, 6], [8, 9, 10], 1)], [trajectory([1], [2, 3])])
    data = Rows.of(batch)
    assert data.groups.tolist() == [0, 0, 1]
    assert data.masked_tokens.tolist() == [1, 3, 2]
    [micro] = micro_batches(data, [0, 1, 2], 1000)
    assert micro.rows.tolist() == [1, 0, 2]  # longest first, then in order
    row, position = micro.where
    found = zip(row, position, micro.targets.tolist(), strict=True)
    pairs = [(micro.rows[r].item(), micro.tokens[r, p].item(), t) for r, p, t in found]
    assert pairs == [(1, 6, 8), (1, 8, 9), (1, 9, 10), (0, 6, 7), (2, 1, 2), (2, 2, 3)]
    assert micro.behaviour.tolist() == pytest.approx([-0.58, -0.59, -0.6, -0.57, -0.52, -0.53])


def test_micro_batches_keep_to_their_budget_and_lose_no_row() -> None:
    batch = batch_of(*[[trajectory([1] * n, [2] * (n % 4 + 1))] for n in range(1, 30)])
    data = Rows.of(batch)
    found = list(micro_batches(data, range(29), 64))
    assert sorted(r for m in found for r in m.rows.tolist()) == list(range(29))
    assert all(m.tokens.numel() <= 64 for m in found)
