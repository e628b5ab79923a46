"""Tests float32 master weights of a bfloat16 policy: no update is lost, and the policy equals the rounded master
weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import parse_recorded
from rollflow.testing.learners import batch, trained
from tests.support.tiny_policy import make_policy, make_weights

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def begun(folder: Path, kind: str, learning_rate: float = 1e-6) -> TorchLearner:
    """Build a learner. `kind` is float32, masters (bfloat16 with master weights) or policy (only bfloat16). All kinds
    start with the same bfloat16 weights.
    """
    model = load_model(folder, "bfloat16", trained=True)
    config = TorchTrain(
        warmup_versions=0, learning_rate=learning_rate, master_dtype="policy" if kind == "policy" else "float32"
    )
    given = model.float() if kind == "float32" else model
    return TorchLearner(given, config, temperature=1.0, versions=99, longest=9, seed=0)


def all_of(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors.values()])


def policy(made: TorchLearner) -> Tensor:
    """Return the policy's weights as one vector."""
    return all_of(dict(made.model.named_parameters()))


def share_moved(made: TorchLearner) -> float:
    """Return the share of the optimizer's weights that one step changes."""
    before = all_of(made.policy.trained.parameters).clone()
    made.step(batch(0), 0)
    return float((all_of(made.policy.trained.parameters) != before).float().mean())


def test_master_weights_lose_no_small_updates(folder: Path) -> None:
    found = {kind: share_moved(begun(folder, kind)) for kind in ("float32", "masters", "policy")}
    assert found["float32"] > 0.99
    assert found["masters"] > 0.99 * found["float32"]
    assert found["policy"] < 0.05  # without master weights, most updates are lost


def test_fifty_steps_with_master_weights_match_float32(folder: Path) -> None:
    """Most weights move in the same direction; not all, because gradients in bfloat16 differ a little. Without master
    weights, fewer weights move.
    """
    start = policy(begun(folder, "masters"))
    whole, made, lost = (trained(begun(folder, kind, 2e-5), 50) for kind in ("float32", "masters", "policy"))
    rounded = policy(whole).to(BF16).float()  # type: ignore[arg-type]
    moved = [float((weights != start).float().mean()) for weights in (rounded, policy(made), policy(lost))]  # type: ignore[arg-type]
    assert moved[0] > 0.05
    assert moved[1] == pytest.approx(moved[0], rel=0.1)
    assert moved[2] < 0.5 * moved[0]
    same = (rounded - start).sign() == (policy(made) - start).sign()  # type: ignore[arg-type]
    assert float(same.float().mean()) > 0.95


def test_policy_equals_its_rounded_master_weights(folder: Path) -> None:
    made = begun(folder, "masters", 1e-3)
    for version in range(3):
        made.step(batch(version), version)
        for name, parameter in made.model.named_parameters():
            assert parameter.dtype == BF16
            assert torch.equal(parameter.detach(), made.policy.trained.parameters[name].detach().to(BF16))
            assert parameter.grad is None


def test_bfloat16_micro_batch_gradients_are_summed_in_float32(folder: Path) -> None:
    """After 256 micro-batches, the gradient of one more micro-batch is smaller than a rounding step of a bfloat16
    sum.
    """
    made = begun(folder, "masters")
    name, parameter = next(iter(made.model.named_parameters()))
    for _ in range(257):
        parameter.grad = torch.ones_like(parameter)
        made.policy.trained.take_gradients()
    grad = made.policy.trained.parameters[name].grad
    assert grad is not None
    assert float(grad.max()) == 257.0  # in bfloat16 the sum stays at 256


def test_master_weights_follow_in_place_policy_changes(folder: Path) -> None:
    """Other code, such as a cold start, may change the policy's weights in place."""
    made = begun(folder, "masters")
    made.step(batch(0), 0)
    parameter = made.model.get_input_embeddings().weight
    with torch.no_grad():
        parameter.add_(1.0)
    changed = parameter.detach().clone()
    made.step(batch(1), 1)
    torch.testing.assert_close(parameter.detach(), changed, atol=1e-2, rtol=0)


@pytest.mark.parametrize("kind", ["float32", "masters", "policy"])
def test_gradients_of_a_cold_start_are_deleted(folder: Path, kind: str) -> None:
    """If gradients of a cold start were kept, a replay of the first train step would give different weights."""
    fresh, left = begun(folder, kind, 1e-2), begun(folder, kind, 1e-2)
    for parameter in left.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in (fresh, left):
        each.step(batch(0), 0)
    assert torch.equal(policy(fresh), policy(left))


def test_float32_policy_has_no_separate_master_weights(folder: Path) -> None:
    made = begun(folder, "float32")
    made.step(batch(0), 0)
    assert all(made.policy.trained.parameters[name] is parameter for name, parameter in made.model.named_parameters())
    assert not any("master" in name for name in made.policy.tensors())


def test_recorded_run_keeps_its_attention_and_weight_decay() -> None:
    """Another attention, float64 sums, or norms without weight decay would give other bits in a replay."""
    config = RunConfig().model_dump(mode="json")
    keys = {
        "attention": ("exact", "default"),
        "advantage_dtype": ("float64", "float32"),
        "decayed": ("matrices", "all"),
    }
    assert {key: config["train"].pop(key) for key in keys} == {key: new for key, (new, _) in keys.items()}
    found = parse_recorded(config).train
    assert {key: getattr(found, key) for key in keys} == {key: old for key, (_, old) in keys.items()}


@pytest.mark.parametrize("recorded", [{}, {"master_dtype": "float32", "share_prompts": True, "fused_adamw": True}])
def test_older_recorded_run_keeps_its_master_dtype_and_adamw(recorded: dict[str, object]) -> None:
    """A run from before master weights existed also shares no prompts and uses no fused optimizer, because otherwise a
    replay would give different bits.
    """
    config = RunConfig().model_dump(mode="json")
    del config["train"]["master_dtype"], config["train"]["share_prefixes"], config["train"]["fused_adamw"]
    config["train"] |= recorded
    found = parse_recorded(config).train
    assert found.master_dtype == recorded.get("master_dtype", "policy")
    assert found.fused_adamw == recorded.get("fused_adamw", False)
    assert found.share_prefixes == ("prompts" if recorded.get("share_prompts") else "none")


def test_probe_tolerance_is_larger_in_bfloat16() -> None:
    """In bfloat16, a correct engine's log-probs differ from the learner's by 0.06 to 0.5 nats on single tokens; a lower
    tolerance would end the run.
    """
    plain = RunConfig()
    half = plain.model_copy(update={"policy": plain.policy.model_copy(update={"dtype": "bfloat16"})})
    strict = half.model_copy(update={"engine": half.engine.model_copy(update={"probe_tolerance": 0.2})})
    assert (plain.probe_tolerance, half.probe_tolerance, strict.probe_tolerance) == (0.01, 1.0, 0.2)
