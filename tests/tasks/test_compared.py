"""How far two files of tensors are apart, by hand; and the same training on another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollflow.tasks.learners.compared import FAR, Distance, distance_of_files
from rollflow.tasks.learners.config import Critic, DeepSpeedTrain, TorchTrain, with_ranks
from rollflow.tasks.learners.shards import file_of
from rollflow.tasks.objectives.config import PartsObjective


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Distance:
    return distance_of_files("file.safetensors", file_of(ours), file_of(theirs))


@pytest.mark.parametrize(
    ("ours", "theirs", "most", "near"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, True),
        ([1.0, 2.0], [1.0, 2.0 + 2**-17], 2**-17, True),  # 7.6e-6
        ([1.0, 2.0], [1.0, 2.0 + 2**-16], 2**-16, False),  # 1.5e-5
        ([], [], 0.0, True),
    ],
)
def test_of_float32(ours: list[float], theirs: list[float], most: float, near: bool) -> None:
    assert apart({"a": torch.tensor(ours)}, {"a": torch.tensor(theirs)}) == Distance(most, near)


def test_a_short_type_may_be_a_step_of_it_away() -> None:
    def of(value: float) -> dict[str, Tensor]:
        return {"a": torch.tensor([value], dtype=torch.bfloat16)}

    assert apart(of(1.0), of(1.0 + 2**-7)) == Distance(2**-7, near=True)
    assert apart(of(1.0), of(1.0 + 2**-5)) == Distance(2**-5, near=False)


@pytest.mark.parametrize(
    "theirs",
    [
        {"b": torch.zeros(2)},
        {"a": torch.zeros(3)},
        {"a": torch.zeros(2, dtype=torch.float64)},
        {"a": torch.zeros(2), "b": torch.zeros(1)},
        {"a": torch.tensor([0.0, torch.nan])},
    ],
)
def test_what_has_other_tensors_or_no_number_is_far(theirs: dict[str, Tensor]) -> None:
    assert not apart({"a": torch.zeros(2)}, theirs).near


def test_whole_numbers_are_the_same_or_far() -> None:
    assert apart({"a": torch.tensor([1])}, {"a": torch.tensor([1])}) == Distance()
    assert apart({"a": torch.tensor([1])}, {"a": torch.tensor([2])}) == FAR


@pytest.mark.parametrize(
    "train",
    [
        TorchTrain(ranks=4, spread=True, sharded=True, learning_rate=3e-5, objective=PartsObjective(kind="dapo")),
        TorchTrain(minibatches=2, objective=PartsObjective(kind="ppo"), critic=Critic(learning_rate=2e-4)),
        DeepSpeedTrain(ranks=3, zero=3, options={"zero_optimization": {"reduce_bucket_size": 7}}),
    ],
)
def test_another_number_of_ranks_changes_nothing_else(train: Any) -> None:
    three, one = with_ranks(train, 3), with_ranks(train, 1)
    assert three == train.model_copy(update={"ranks": 3, "spread": False})
    assert (one.learner, one.ranks, getattr(one, "sharded", None)) == ("torch", 1, False)
    moved = {"learner", "ranks", "spread", "sharded", "zero", "offload", "options"}
    assert one.model_dump(exclude=moved) == train.model_dump(exclude=moved)
