"""Collective operations of learner ranks: sums, and train steps with them. Here ranks are threads that use gloo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import NotFinite
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import Lora, TorchTrain
from rollflow.tasks.learners.distributed import gloo_ranks
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.distributed.ranks import RankLost, Ranks
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.config import PartsObjective, Penalties
from rollflow.testing.learners import batch, batch_of, saved, trajectory
from tests.support.rank_threads import on_ranks
from tests.support.tiny_policy import make_policy, make_weights

NEAR = 1e-5
READS = Lock()  # transformers cannot read two models at a time in one process
CONFIGS: dict[str, TorchTrain] = {
    "GRPO": TorchTrain(),
    "GRPO, rows alone, a few tokens in a pass": TorchTrain(share_prefixes="none", micro_tokens=16),
    "decoupled PPO": TorchTrain(minibatches=2, objective=PartsObjective(kind="decoupled-ppo")),
    "PPO with a critic": TorchTrain(minibatches=2, objective=PartsObjective(kind="ppo")),
    "a look at the whole batch": TorchTrain(objective=PartsObjective(kind="m2po", correction={"second_moment": 30})),
    "all roles": TorchTrain(
        objective=PartsObjective(kind="ppo", penalties=Penalties(kl_to="reference", kl_weight=0.1, kl_target=0.01))
    ),
    "LoRA": TorchTrain(lora=Lora(rank=4)),
}
Weights = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def begun(folder: Path, config: TorchTrain, ranks: Ranks) -> TorchLearner:
    start = LearnerStart(folder, trained=True, versions=10, first=lambda: folder)
    with READS:
        made = TorchLearner.create(config.model_copy(update={"learning_rate": 1e-4}), start)
    made.ranks = ranks
    return made


def trained(folder: Path, config: TorchTrain, count: int, batches: Callable[[int], TrajectoryBatch]) -> Any:
    """Train ten steps on each rank; return each step's metrics, and the weights."""

    def work(ranks: Ranks) -> tuple[list[Mapping[str, float]], dict[str, Tensor]]:
        made = begun(folder, config, ranks)
        return [made.step(batches(version), version) for version in range(10)], made.policy.weights()

    return on_ranks(count, work)


@cache
def alone(folder: Path, name: str) -> Any:
    """Return the result of one rank on the same batches."""
    return trained(folder, CONFIGS[name], 1, batch)[0]


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_number_of_learner_ranks_trains_like_one(folder: Path, name: str, count: int) -> None:
    """Metrics of ten steps and the weights are near those of one rank; all ranks agree to the bit."""
    expected, weights = alone(folder, name)
    first, *others = trained(folder, CONFIGS[name], count, batch)
    for told, one in zip(first[0], expected, strict=True):
        assert told.pop("rank_imbalance") >= 0
        assert told == pytest.approx(one, abs=NEAR, rel=1e-4)
    assert farthest(first[1], weights) < NEAR
    for other in others:
        assert farthest(first[1], other[1]) == 0


def farthest(one: Weights, other: Weights) -> float:
    """Return the largest difference between two weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def one_with_signal(seed: int) -> TrajectoryBatch:
    """Return a batch where only the first of four groups has an advantage: with shared prompts, one rank runs all."""
    groups = [
        [trajectory([5, 6, 7 + seed], [8 + g, 9, 3 + i], i, float(g == 0 and i > 1)) for i in range(4)]
        for g in range(4)
    ]
    return batch_of(*groups)


@pytest.mark.long
@pytest.mark.parametrize("with_signal", [True, False])
def test_learner_ranks_without_rows_take_part_in_the_step(folder: Path, with_signal: bool) -> None:
    """If no rank has rows, AdamW does the same as on one rank: nothing, not even weight decay."""

    def batches(seed: int) -> TrajectoryBatch:
        return (
            one_with_signal(seed)
            if with_signal
            else batch_of([trajectory([5, 6], [7 + seed, 8], i, 1.0) for i in range(4)])
        )

    config = TorchTrain(weight_decay=0.1)
    expected, weights = trained(folder, config, 1, batches)[0]
    for told, found in trained(folder, config, 4, batches):
        assert [one["loss"] for one in told] == pytest.approx([one["loss"] for one in expected], abs=NEAR)
        assert farthest(found, weights) < NEAR
    assert (farthest(weights, begun(folder, config, Ranks()).policy.weights()) > 0) == with_signal


@pytest.mark.parametrize("count", [1, 2])
def test_learner_state_of_four_ranks_continues_on_fewer(folder: Path, count: int) -> None:
    config = CONFIGS["PPO with a critic"]

    def store(ranks: Ranks) -> tuple[Any, Mapping[str, float]]:
        made = begun(folder, config, ranks)
        made.step(batch(0), 0)
        return saved(made), made.step(batch(1), 1)

    stored, expected = on_ranks(4, store)[0]

    def go_on(ranks: Ranks) -> tuple[Any, Mapping[str, float]]:
        made = begun(folder, config, ranks)
        ranks.add(torch.zeros(1))  # wait until all learners exist: each seeds the generator that the threads share
        made.load(*stored)
        return saved(made), made.step(batch(1), 1)

    for again, told in on_ranks(count, go_on):
        assert again == stored
        assert told["loss"] == pytest.approx(expected["loss"], abs=NEAR)


def test_nonfinite_loss_is_raised_on_every_rank(folder: Path) -> None:
    """Only one rank has the NaN, and no rank changes anything."""

    def work(ranks: Ranks) -> str:
        made = begun(folder, TorchTrain(), ranks)
        before = saved(made)
        if ranks.rank == 1:
            add = made.ranks.add_gradients
            made.ranks.add_gradients = lambda parameters, loss: add(parameters, math.nan)  # type: ignore[method-assign]
        with pytest.raises(NotFinite) as caught:
            made.step(batch(0), 0)
        assert saved(made) == before
        return str(caught.value)

    assert len(set(on_ranks(2, work))) == 1


# --- sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [1, 5, 1000])
def test_gradients_over_ranks_match_a_hand_calculation(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r has gradient r of the first parameter; only rank 1 has the second; no rank has the third."""
    monkeypatch.setattr(gloo_ranks, "BUCKET", bucket)

    def work(ranks: Ranks) -> tuple[float, list[nn.Parameter]]:
        given = [
            nn.Parameter(torch.zeros(2, 2)),
            nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(1)),
        ]
        given[0].grad = torch.full((2, 2), float(ranks.rank))
        if ranks.rank == 1:
            given[1].grad = torch.tensor([1, 2, 3], dtype=torch.bfloat16)
        return ranks.add_gradients(given, 0.5), given

    for loss, (first, second, third) in on_ranks(3, work):
        assert loss == 1.5
        assert torch.equal(first.grad, torch.full((2, 2), 3.0))  # type: ignore[arg-type]
        assert torch.equal(second.grad, torch.tensor([1, 2, 3], dtype=torch.bfloat16))  # type: ignore[arg-type]
        assert third.grad is None


def test_bfloat16_gradients_of_ranks_are_summed_in_float32() -> None:
    """256 + 1 + 1 is 258; added up in bfloat16 it stays 256."""

    def work(ranks: Ranks) -> float:
        given = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        given.grad = torch.tensor([256.0 if ranks.rank == 0 else 1.0], dtype=torch.bfloat16)
        ranks.add_gradients([given], 0.0)
        return float(given.grad)

    assert on_ranks(3, work) == [258.0] * 3


def test_gathered_arrays_match_a_hand_calculation() -> None:
    """Rank r has r numbers; the rank without numbers is left out."""
    found = on_ranks(3, lambda ranks: ranks.gather_all(np.full(ranks.rank, ranks.rank + 0.5)))
    assert [[part.tolist() for part in parts] for parts in found] == [[[1.5], [2.5, 2.5]]] * 3
    assert on_ranks(2, lambda ranks: ranks.gather_all(np.zeros(0))) == [[], []]


@pytest.mark.parametrize("to", range(4))
def test_shards_gathered_on_one_rank_match_a_hand_calculation(to: int) -> None:
    """Rank r has r of the 1 + 2 + 3 numbers; rank 0 has none."""

    def work(ranks: Ranks) -> list[float]:
        assert isinstance(ranks, GlooRanks)
        found = torch.zeros(6)
        parts = list(found.split([0, 1, 2, 3])) if ranks.rank == to else []
        ranks.gather_to(to, torch.full((ranks.rank,), float(ranks.rank)), parts)
        return found.tolist()

    assert on_ranks(4, work) == [[1.0, 2.0, 2.0, 3.0, 3.0, 3.0] if rank == to else [0.0] * 6 for rank in range(4)]


def test_error_names_a_learner_rank_that_is_late() -> None:
    """The other ranks wait no longer than their time limit."""

    def work(ranks: Ranks) -> list[int]:
        assert isinstance(ranks, GlooRanks)
        ranks.add(torch.ones(1))
        if ranks.rank == 1:
            return []
        with pytest.raises(RankLost):
            ranks.add(torch.ones(1))
        return ranks.find_late()

    assert on_ranks(3, work, seconds=1.0) == [[1], [], [1]]


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_all_learner_ranks_pack_the_same_sequences(folder: Path) -> None:
    """The first rank tests if prompts can be shared, and sends the result. Otherwise ranks would skip or repeat
    rows.
    """
    start = LearnerStart(folder, trained=True, versions=10)
    made = MultiRankLearner(TorchTrain(ranks=2), start)
    alone = TorchLearner.create(TorchTrain(share_prefixes="none"), start)
    assert made._own.sharing is not None
    made._own.sharing = None
    for version in range(2):
        told, expected = (one.step(batch(version), version) for one in (made, alone))
        assert {name: told[name] for name in expected} == pytest.approx(expected, abs=NEAR, rel=1e-4)
    made._others.end()
