"""Tests that a learner that starts without weights, as before a restore, equals any other learner after a load.

The worst content of uninitialized memory is simulated: every parameter starts as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners import torch_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.forward import models
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.testing.learners import saved
from tests.contracts.test_shared_prompts import groups
from tests.contracts.test_token_logprobs import ARCHITECTURES, OTHERS, model_of
from tests.support.tiny_policy import make_policy, make_weights


@pytest.fixture(autouse=True)
def bad_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the parameters of blank models with NaN."""

    def loaded(folder: Path, dtype: str, *, trained: bool, blank: bool = False, attention: str) -> Any:
        model = load_model(folder, dtype, trained=trained, blank=blank, attention=attention)
        for parameter in model.parameters() if blank else ():
            parameter.data.fill_(torch.nan)
        return model

    monkeypatch.setattr(torch_learner, "load_model", loaded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def begun(folder: Path, **given: Any) -> TorchLearner:
    given = {"trained": True, "versions": 9, "longest": 9, "seed": 3, **given}
    config = TorchTrain.model_validate({"warmup_versions": 0, **given.pop("train", {})})
    return TorchLearner.create(config, LearnerStart(folder, **given))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_every_architecture_can_start_with_empty_weights(name: str, dtype: str, tmp_path: Path) -> None:
    """Buffers that no file contains, such as position tables, exist too. Parameters that must be float32 stay so."""
    model_of(name).save_pretrained(tmp_path)
    made, other = begun(tmp_path, dtype=dtype), begun(tmp_path, dtype=dtype, trained=False, blank=True, seed=4)
    assert other.sharing is None
    other.load(*saved(made))
    assert other.sharing == made.sharing
    assert other.logprobs((3, 4, 5, 6)) == made.logprobs((3, 4, 5, 6))
    assert other.step(groups(), 0) == made.step(groups(), 0)
    assert saved(other) == saved(made)


@pytest.mark.parametrize("part", [{"objective": {"kind": "ppo"}}, {"lora": {"rank": 4}}], ids=["critic", "LoRA"])
def test_new_parts_get_equal_random_weights_in_a_blank_model(folder: Path, part: Mapping[str, Any]) -> None:
    """A critic's head, an adapter and all later random numbers are the same with and without a blank model."""
    found = []
    for blank in (False, True):
        made = begun(folder, trained=False, blank=blank, train=part)
        drawn = [p.detach() for name, p in made.policy.trained.parameters.items() if "lora_" in name]
        drawn += [made.critic.model.head.weight.detach()] if made.critic else []
        found.append([*drawn, torch.get_rng_state()])
    assert len(found[0]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_empty_model_is_checked_after_its_first_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds out whether responses can share the tokens of a prompt. It runs only once."""
    seen: list[bool] = []

    def tried(model: Any, *_: Any) -> None:
        seen.append(any(bool(parameter.isnan().any()) for parameter in model.parameters()))

    made = begun(folder)
    monkeypatch.setattr(models, "find_sharing", tried)
    other = begun(folder, blank=True)
    assert seen == []
    for _ in range(2):
        other.load(*saved(made))
    assert (seen, other.sharing) == ([False], None)


def test_unusable_lm_head_is_refused_after_the_weights_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = begun(folder), begun(folder, blank=True)
    monkeypatch.setattr("rollflow.tasks.policies.head.NEAR", {torch.float32: -1.0})
    with pytest.raises(ConfigError, match=r"^policy.path: the output layer of a .* cannot be run on its own"):
        other.load(*saved(made))
