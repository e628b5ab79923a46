"""LoRA: which weights are trained and published, and how a restarted learner continues."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners.config import Lora, TorchTrain
from rollflow.tasks.learners.forward.lora import LoraPolicy
from rollflow.tasks.learners.forward.reference import named_tensors
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import new_learner, restore
from rollflow.testing.learners import PROBE, batch, joined, saved, trained
from tests.contracts.test_token_logprobs import learner_of, model_of, one_row
from tests.support.small_run import prepare_small, train_small
from tests.support.tiny_policy import make_policy, make_weights
from tests.support.waiting import HANG_SECONDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def learner(folder: Path, dtype: str = "float32", **changes: Any) -> TorchLearner:
    config = TorchTrain(**{"warmup_versions": 0, "learning_rate": 1e-2, "lora": Lora(rank=4), **changes})
    first = lambda: named_tensors(load_model(folder, dtype, trained=True))  # noqa: E731
    model = load_model(folder, dtype, trained=True)
    return TorchLearner(model, config, temperature=1.0, versions=10, longest=9, seed=0, first=first)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def layers(made: TorchLearner) -> dict[str, Any]:
    assert isinstance(made.policy, LoraPolicy)
    return made.policy._layers


# --- trained weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_trains_only_the_adapter(folder: Path, dtype: str) -> None:
    made = learner(folder, dtype)
    base = copied(made.policy._model_tensors())
    adapter = copied(made.policy.tensors())
    trained(made, 2)
    assert {name for name, p in made.model.named_parameters() if p.requires_grad or p.grad is not None} == {
        name for name, _ in made.model.named_parameters() if ".lora_" in name
    }
    assert all(torch.equal(tensor, base[name]) for name, tensor in made.policy._model_tensors().items())
    now = made.policy.tensors()
    assert all(not torch.equal(now[name], tensor) for name, tensor in adapter.items())
    assert all(tensor.dtype == torch.float32 for tensor in now.values())


@pytest.mark.parametrize(("dtype", "warned"), [("float32", 0), ("bfloat16", 1)])
def test_bfloat16_rounding_of_a_lora_adapter_is_logged_once(
    folder: Path, dtype: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the share of the adapter's contribution that rounding removes from the published weights."""
    made = learner(folder, dtype)
    made.weights()
    assert not caplog.records  # the new adapter adds nothing to the weights yet
    made.step(batch(0), 0)
    base = copied(made.policy._model_tensors())
    assert isinstance(made.policy, LoraPolicy)
    published = copied(made.policy.weights())
    made.weights()
    said = [record.getMessage() for record in caplog.records if "[train.lora]" in record.getMessage()]
    assert len(said) == warned
    added = lost = 0.0
    for name, layer in layers(made).items():
        part = 8.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()  # alpha / rank = 32 / 4
        whole = base[f"{name}.weight"].float() + part
        added += float(part.square().sum())
        lost += float((published[f"{name}.weight"].float() - whole).square().sum())
    share = f"by {100 * math.sqrt(lost / added):.0f}%"
    assert all(share in text for text in said)


def test_lora_targets_choose_the_adapted_layers(folder: Path) -> None:
    every, some = learner(folder), learner(folder, lora=Lora(targets=("q_proj", "mlp.down_proj")))
    assert len(layers(every)) == 14  # two blocks of q, k, v, o, gate, up, down
    assert sorted(layers(some)) == [
        f"model.layers.{n}.{part}" for n in range(2) for part in ("mlp.down_proj", "self_attn.q_proj")
    ]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_lora_adapts_all_linear_layers_of_a_mixture_of_experts(name: str) -> None:
    """By default, peft would choose the layers by the type of the model."""
    model = model_of(name)
    linear = {name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
    made = learner_of(model, lora=Lora(rank=2))
    assert layers(made).keys() == {f"model.{name}" for name in linear}
    some = layers(learner_of(model_of(name), lora=Lora(rank=2, targets=("up_proj",))))
    assert some.keys() == {f"model.{name}" for name in linear if name.endswith(".up_proj")}
    made.step(one_row()[1], 0)
    assert saved(made)


def test_unknown_lora_target_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"targets contains \['c_proj'\], .* no linear layer of this name; .* down_proj, gate_proj"
    ):
        learner(folder, lora=Lora(targets=("q_proj", "c_proj")))


def test_cold_start_trains_base_weights_not_the_lora_adapter(folder: Path) -> None:
    """A cold start (supervised training) trains the base weights. The first version, and the base weights of the
    second, are bit-identical to the result.
    """
    made = learner(folder)
    made.model(input_ids=torch.tensor([PROBE])).logits.sum().backward()
    named = dict(made.model.named_parameters())
    assert all((p.grad is None) == (".lora_" in name) for name, p in named.items())
    with torch.no_grad():
        for name, parameter in named.items():
            if parameter.grad is not None and ".lora_" not in name:
                parameter.add_(parameter.grad, alpha=-1e-3)
    published = copied(made.policy.weights())
    made.model.zero_grad()
    made.step(batch(0), 0)
    assert all(torch.equal(tensor, published[name]) for name, tensor in made.policy._model_tensors().items())


LOADED = """
import sys
from pathlib import Path
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
build_learner(TorchTrain(), LearnerStart(Path(sys.argv[1]), trained=True))
print(*{"peft", "accelerate"} & set(sys.modules))
"""


@pytest.mark.long
def test_learner_without_lora_does_not_import_peft(folder: Path) -> None:
    command = [sys.executable, "-c", LOADED, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


# --- published weights ------------------------------------------------------------------------------------


def test_lora_adapter_of_rank_one_matches_a_hand_calculation(folder: Path) -> None:
    """alpha / rank = 6. Two entries of the published weight W + 6 x b a change by 6 x 2 x 0.5 = 6 and 6 x (-1) x 0.25 =
    -1.5.
    """
    made = learner(folder, lora=Lora(rank=1, alpha=6.0, targets=("layers.0.self_attn.q_proj",)))
    made.policy.begin(1e-2)
    ((name, layer),) = layers(made).items()
    base = layer.get_base_layer().weight.detach().clone()
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()[0, :2] = torch.tensor([0.5, 0.25])
        layer.lora_B["default"].weight.zero_()[[3, 5], 0] = torch.tensor([2.0, -1.0])
    added = made.policy.weights()[f"{name}.weight"] - base
    assert added[3, 0] == pytest.approx(6.0, abs=1e-5)
    assert added[5, 1] == pytest.approx(-1.5, abs=1e-5)
    assert int((added != 0).sum()) == 4


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_published_lora_policy_has_the_log_probs_of_peft(folder: Path, dtype: str, near: float) -> None:
    made = trained(learner(folder, dtype), 3)
    assert isinstance(made, TorchLearner)
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(load_model(folder, dtype, trained=True), config)
    named = {name.replace(".default.", "."): p for name, p in theirs.named_parameters()}
    with torch.no_grad():
        for name, tensor in made.policy.trained.parameters.items():
            named[f"base_model.model.{name}"].copy_(tensor)
        logp = torch.log_softmax(theirs(input_ids=torch.tensor([PROBE])).logits[0, :-1].float(), -1)
    found = logp.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0]
    assert made.logprobs(PROBE) == pytest.approx(found.tolist(), abs=near)
    assert made.logprobs(PROBE) != pytest.approx(learner(folder, dtype).logprobs(PROBE), abs=2 * near)


def test_lora_reference_is_the_policy_without_its_adapter(folder: Path) -> None:
    objective = {"penalties": {"kl_to": "reference", "kl_weight": 0.1}}
    made = learner(folder, objective=objective)
    first = made.logprobs(PROBE)
    assert made.step(batch(0), 0)["kl_reference"] == 0.0
    trained(made, 2)
    assert made.reference is not None
    tokens, position = torch.tensor([PROBE]), torch.arange(3)
    with torch.no_grad():
        found, _ = made.reference.token_logprobs({"input_ids": tokens}, (position * 0, position), tokens[0, 1:])
    assert found.tolist() == pytest.approx(first, abs=1e-6)
    assert made.logprobs(PROBE) != pytest.approx(first, abs=1e-3)


# --- stored state ------------------------------------------------------------------------------------------


def test_stored_lora_state_is_the_adapter_and_its_moments(folder: Path) -> None:
    """The policy has 0.13 million parameters. An adapter of rank 2 has only 5,632: 2 x (in + out) for each layer."""
    small, whole = (trained(learner(folder, lora=lora), 1) for lora in (Lora(rank=2), None))
    sizes = [sum(len(data) for data in joined(made.state()).values()) for made in (small, whole)]
    inputs = [layer.in_features + layer.out_features for layer in layers(small).values()]  # type: ignore[arg-type]
    assert 2 * sum(inputs) == 5632
    # three float32 numbers for each parameter, the names of tensors, and the state of the random generator
    assert sizes[0] < 3 * 4 * 5632 + 20_000
    assert sizes[1] > 2 * 4 * 130_000


def test_lora_loads_weights_that_differ_from_base_plus_adapter(folder: Path) -> None:
    """Loaded weights may differ from base plus adapter. The difference then becomes part of the base weights."""
    made, other = (trained(learner(folder), 2) for _ in range(2))
    assert isinstance(made, TorchLearner)
    assert isinstance(other, TorchLearner)
    weights = copied(made.policy.weights())
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name][0] += 1e-3
    other.policy.take(weights.items())
    other.policy.load(copied(other.policy.tensors()).items())
    found = other.policy.weights()
    torch.testing.assert_close(found[name][0], weights[name][0], atol=1e-6, rtol=0)
    weights[name][0], found[name][0] = 0, 0
    assert all(torch.equal(tensor, weights[key]) for key, tensor in found.items())


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunContext]:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    return lambda run_id, **store: prepare_small(tmp_path, run_id, train={"lora": {"rank": 4}}, keep_last=10, **store)


@pytest.mark.parametrize("every", [1, 4])
def test_killed_lora_learner_ends_with_the_same_bits(small: Callable[..., RunContext], every: int) -> None:
    """The restarted learner finds the same base weights again, and replays train steps bit for bit."""
    whole, broken = small("whole"), small("broken", state_every=every)
    train_small(whole)
    for until in (0, 2, 3, 5):
        train_small(broken, until)
    assert train_small(broken).status().replayed == (1 if every == 4 else 0)
    ends = []
    for context in (whole, broken):
        made = new_learner(context, blank=True)
        how = restore(context.policies, context.batches, made, 6)
        assert how.differed == []
        ends.append(saved(made))
    assert ends[0] == ends[1]
