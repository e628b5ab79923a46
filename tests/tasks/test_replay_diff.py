"""The distance between two tensor files, in examples worked by hand, and a replay's config on another number of
ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollflow.tasks.learners.checkpoint.shards import file_of
from rollflow.tasks.learners.config import CriticConfig, DeepSpeedTrain, TorchTrain, with_ranks
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.run.replay_diff import FAR, ReplayDistance, distance_of_files


def apart(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], before: dict[str, Tensor] | None = None
) -> ReplayDistance:
    return distance_of_files(
        "file.safetensors", file_of(ours), file_of(theirs), file_of(before) if before is not None else None
    )


@pytest.mark.parametrize(
    ("ours", "most", "near"),
    [
        ([1.3, 2.4], 0.0, True),
        ([1.3, 2.44], 0.04, True),
        ([1.34, 2.44], 0.04, False),  # together 0.057
        ([1.3, 2.46], 0.06, False),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_replay_tolerates_a_tenth_of_the_weight_change(
    ours: list[float], most: float, near: bool, scale: float
) -> None:
    """The step changed two weights by 0.3 and 0.4, a norm of 0.5; the same holds for tiny steps."""
    made, published, parent = ({"a": torch.tensor(v).double() * scale} for v in (ours, [1.3, 2.4], [1.0, 2.0]))
    found = apart(made, published, parent)
    assert found.most == pytest.approx(most * scale, abs=1e-6 * scale)
    assert found.near == near


def test_replay_compares_tensors_of_a_kind_together() -> None:
    """`b` alone is too far, but not together with `a`. A tensor that the parent lacks was zero there."""
    parent = {"a": torch.zeros(2), "b": torch.zeros(1)}
    published = {"a": torch.full((2,), 3.0), "b": torch.ones(1), "exp_avg/a": torch.full((2,), 0.1)}
    made = {**published, "b": torch.tensor([1.3])}
    assert apart(made, published, parent).near
    assert not apart({"b": made["b"]}, {"b": published["b"]}, parent).near
    assert apart({**made, "exp_avg/a": torch.full((2,), 0.109)}, published, parent).near
    assert not apart({**made, "exp_avg/a": torch.full((2,), 0.111)}, published, parent).near


def test_replay_compares_each_element_with_its_change() -> None:
    """The step moved 10,000 elements by 0.01 each, a norm of 1; one wrong element differs by less than a tenth."""
    parent = {"a": torch.zeros(10_000)}
    published = {"a": torch.full((10_000,), 0.01)}
    turned, wrong = published["a"].clone(), published["a"].clone()
    turned[7], wrong[7] = -0.01, 0.05
    assert apart({"a": turned}, published, parent).near
    assert not (found := apart({"a": wrong}, published, parent)).near
    assert found.most == pytest.approx(0.04)


def test_replay_tolerates_half_the_change_in_bfloat16() -> None:
    def of(value: float) -> dict[str, Tensor]:
        return {"a": torch.tensor([value], dtype=torch.bfloat16)}

    assert apart(of(1.0 + 2**-7), of(1.0 + 2**-6), of(1.0)).near
    assert not apart(of(1.0), of(1.0 + 2**-6), of(1.0)).near


def test_replay_accepts_rounding_of_an_unchanged_weight() -> None:
    one = {"a": torch.ones(1)}
    assert apart({"a": torch.tensor([1.0 + 2**-23])}, one, one).near
    assert not apart({"a": torch.tensor([1.0 + 2**-21])}, one, one).near


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
def test_replay_rejects_different_tensors_and_nan(theirs: dict[str, Tensor]) -> None:
    assert not apart({"a": torch.zeros(2)}, theirs).near


def test_replay_accepts_only_equal_integers() -> None:
    assert apart({"a": torch.tensor([1])}, {"a": torch.tensor([1])}) == ReplayDistance()
    assert apart({"a": torch.tensor([1])}, {"a": torch.tensor([2])}) == FAR


@pytest.mark.parametrize(
    "train",
    [
        TorchTrain(ranks=4, multi_node=True, sharded=True, learning_rate=3e-5, objective=PartsObjective(kind="dapo")),
        TorchTrain(minibatches=2, objective=PartsObjective(kind="ppo"), critic=CriticConfig(learning_rate=2e-4)),
        DeepSpeedTrain(ranks=3, zero=3, options={"zero_optimization": {"reduce_bucket_size": 7}}),
    ],
)
def test_replay_config_changes_only_the_number_of_ranks(train: Any) -> None:
    three, one = with_ranks(train, 3), with_ranks(train, 1)
    assert three == train.model_copy(update={"ranks": 3, "multi_node": False})
    assert (one.kind, one.ranks, getattr(one, "sharded", None)) == ("torch", 1, False)
    moved = {"kind", "ranks", "multi_node", "sharded", "zero", "offload", "options"}
    assert one.model_dump(exclude=moved) == train.model_dump(exclude=moved)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_replay_accepts_only_equal_nonfinite_numbers(odd: float) -> None:
    """The number is in the first or second of two tensors of a kind, in the replayed file, the published file, or
    both.
    """
    parent, sound = torch.zeros(4), torch.full((4,), 0.1)
    spoilt = sound.clone()
    spoilt[2] = odd
    for first, second in (("a", "b"), ("b", "a")):
        before, published = {first: parent, second: parent}, {first: sound, second: sound}
        assert not apart({first: spoilt, second: sound}, published, before).near
        assert not apart(published, {first: spoilt, second: sound}, before).near
        assert apart({first: spoilt, second: sound}, {first: spoilt, second: sound}, before).near
        assert apart(published, published, {first: spoilt, second: parent}).near
    other = spoilt.clone()
    other[2] = -odd if odd == odd else float("inf")
    assert not apart({"a": other}, {"a": spoilt}, {"a": parent}).near
    assert not apart({"a": torch.full((4,), 0.2)}, {"a": sound}, {"a": spoilt}).near
