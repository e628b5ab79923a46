"""Advantages, aggregation and packing against values worked by hand; losses: `contracts/test_objectives.py`."""

from __future__ import annotations

import math

import pytest
import torch

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Ending, GroupKey, Trajectory, TrajectoryGroup
from rollflow.tasks.objectives.advantages import EPSILON, group_advantages
from rollflow.tasks.objectives.aggregation import row_weights
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
