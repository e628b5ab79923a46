"""Tests that the key `train.deterministic` changes no bit on a CPU. The state of a GPU is simulated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.storage.errors import Corrupt
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.checkpoint.shards import from_files, to_files
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.randomness import DEVICE_RNG, RNG, begin_process
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.policies.device import WORKSPACE
from rollflow.testing.learners import joined, saved, trained
from tests.support.tiny_policy import make_policy, make_weights

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKSPACE, "taken back behind the test")
    monkeypatch.delenv(WORKSPACE)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def start(tmp_path: Path) -> LearnerStart:
    make_policy(tmp_path)
    make_weights(tmp_path, 0)
    return LearnerStart(tmp_path, trained=True, versions=10, longest=8)


def made(start: LearnerStart, **keys: Any) -> TorchLearner:
    learner = build_learner(TorchTrain.model_validate(keys), start)
    assert isinstance(learner, TorchLearner)
    return learner


@pytest.mark.parametrize(
    "keys",
    [
        {"objective": {"kind": "gspo"}},  # sequence ratios
        {"objective": {"kind": "ppo"}, "minibatches": 2},
        {"objective": {"kind": "m2po"}},
        {"objective": {"penalties": {"kl_to": "reference", "kl_weight": 0.1}}, "checkpoint_activations": True},
        {"share_prefixes": "none", "lora": {"rank": 2}},
    ],
)
def test_key_deterministic_changes_no_bit_on_a_cpu(start: LearnerStart, keys: dict[str, Any]) -> None:
    plain = saved(trained(made(start, **keys), 2))
    assert not torch.are_deterministic_algorithms_enabled()
    learner = trained(made(start, **keys, deterministic=True), 2)
    assert torch.are_deterministic_algorithms_enabled()
    assert saved(learner) == plain


def test_cublas_workspace_is_set_unless_the_user_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_process(TorchTrain(), 0)
    assert WORKSPACE not in os.environ
    begin_process(TorchTrain(deterministic=True), 0)
    assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":16:8")
    begin_process(TorchTrain(deterministic=True), 0)
    assert os.environ[WORKSPACE] == ":16:8"
    begin_process(TorchTrain(), 0)
    assert not torch.are_deterministic_algorithms_enabled()


def test_gpu_random_generator_is_part_of_the_learner_state(
    start: LearnerStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, given = torch.tensor([3, 1, 4], dtype=torch.uint8), list[list[int]]()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: drawn)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.append(state.tolist()))
    learner = made(start, deterministic=True)
    weights, on_cpu = saved(learner)
    learner.device = GPU
    on_gpu = joined(learner.state())
    assert from_files(on_gpu).keys() - from_files(on_cpu).keys() == {DEVICE_RNG}
    drawn = drawn + 1
    learner.load(weights, on_gpu)
    assert given == [[3, 1, 4]]
    learner.load(weights, on_cpu)  # from a machine without a GPU
    learner.device = torch.device("cpu")
    learner.load(weights, on_gpu)
    assert given == [[3, 1, 4]]
    assert joined(learner.state()) == on_cpu


def test_state_has_a_gpu_generator_only_if_deterministic(start: LearnerStart) -> None:
    learner = made(start)
    learner.device = GPU
    assert DEVICE_RNG not in from_files(joined(learner.state()))


def test_state_without_cpu_random_generator_is_refused(start: LearnerStart) -> None:
    learner = made(start)
    weights, state = saved(learner)
    tensors = from_files(state)
    del tensors[RNG]
    with pytest.raises(Corrupt, match=RNG):
        learner.load(weights, joined(to_files("learner/state", tensors, 2**20)))
