"""Tests a small run in which single tokens of the responses have rewards: its metrics, its audit, and its replay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rollflow.flows.commands.cli import main
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Trajectory
from rollflow.storage.token_arrays import Float32s
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.run.context import RunContext
from tests.support import small_run
from tests.support.small_run import prepare_small, train_small


def with_token_rewards(one: Trajectory, draw: Random) -> Trajectory:
    """Return a trajectory with random token rewards. On average, two of three sampled tokens have a reward, and every
    fourth trajectory has no rewards.
    """
    if draw.random() < 0.25:
        return one
    rewards = [draw.choice([0.0, 0.5, math.nan]) if chosen else math.nan for chosen in one.loss_mask]
    return replace(one, reward=1.0, token_rewards=Float32s.of(rewards))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    home, made, draw = tmp_path_factory.mktemp("home"), small_run.batch, Random(0)

    def batch(context: RunContext, number: int, **given: Any) -> StagedBatch:
        staged = made(context, number, **given)
        groups = [
            replace(group, trajectories=tuple(with_token_rewards(one, draw) for one in group.trajectories))
            for group in staged.groups
        ]
        return replace(staged, groups=tuple(groups))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setattr(small_run, "batch", batch)
        context = prepare_small(home, versions=2)
        train_small(context)
        yield context


def test_metric_token_reward_is_the_mean_sum_of_a_trajectory(run: RunContext) -> None:
    version = run.policies.find(1)
    assert version.batch_entry is not None
    file = run.batches.read_commit(version.batch_entry).file
    rows = [one for group in TrajectoryBatch.from_bytes(run.batches.read(file)).groups() for one in group.trajectories]
    sums = [sum(value for value in one.token_rewards or () if not math.isnan(value)) for one in rows]
    assert len({*sums}) > 1
    assert version.metrics["token_reward"] == pytest.approx(sum(sums) / len(sums))


def test_run_with_token_rewards_passes_the_audit(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "small", "--deep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == []


def test_run_with_token_rewards_replays_bit_for_bit(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "small", "--all"]) == 0
    assert "version 2" in capsys.readouterr().out


@pytest.mark.soak
def test_two_ranks_train_token_rewards_like_one_rank(run: RunContext) -> None:
    assert main(["replay", "small", "--all", "--ranks", "2"]) == 0
