"""Tests that a learner's log-probs equal those of the model's own forward pass, on tiny random models of many
architectures with different output heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.forward import token_logprobs
from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.policies.head import measure_distance
from rollflow.testing.learners import batch_of, trajectory

VOCABULARY = 96
SHAPE: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # weights are so large that a cap or a scale matters
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.5,
}
ARCHITECTURES: Mapping[str, Mapping[str, object]] = {  # configs by model type; some have dropout by default
    "llama": SHAPE | {"attention_dropout": 0.5},
    "mistral": SHAPE,
    "qwen2": SHAPE,
    "qwen3": SHAPE,
    "gemma": SHAPE,
    "gemma2": SHAPE | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": SHAPE | {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "granite": SHAPE | {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": SHAPE | {"logits_scaling": 4.0, "num_local_experts": 2, "num_experts_per_tok": 1},
    "cohere": SHAPE | {"logit_scale": 0.25},
    "cohere2": SHAPE | {"logit_scale": 0.25},
    "phi": SHAPE | {"resid_pdrop": 0.5},  # phi's head has a bias
    "phi3": SHAPE | {"resid_pdrop": 0.5},
    "olmo2": SHAPE,
    "smollm3": SHAPE,
    "gpt_neox": SHAPE | {"hidden_dropout": 0.5},
    "opt": SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.5, "dropout": 0.5},
    "gpt2": GPT2,  # the default dropout is 0.1
}
OTHERS: Mapping[str, Mapping[str, object]] = {  # architectures that only some tests use
    "deepseek_v3": SHAPE
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4, "n_group": 1}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "topk_group": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},  # part of the experts' gate stays in float32
    "qwen3_moe": SHAPE
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
NOTHING: Mapping[str, object] = MappingProxyType({})
DROPOUT = {"llama", "phi", "phi3", "gpt_neox", "opt", "gpt2"}


@dataclass
class Spy(Objective):
    """An objective that records its inputs."""

    uses_batch: bool = False  # type: ignore[misc]
    every_row: bool = True  # type: ignore[misc]
    before: list[Tensor] = field(default_factory=list)
    trained: list[MaskedTokens] = field(default_factory=list)

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        self.trained.append(tokens)
        return TokenLoss(0.0 * tokens.logp_M, torch.zeros_like(tokens.logp_M, dtype=torch.bool))

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        self.before.append(proximal_B)
        return torch.ones_like(proximal_B, dtype=torch.bool)


def model_of(name: str, more: Mapping[str, object] = NOTHING) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**(ARCHITECTURES | OTHERS)[name], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases, which start as zeros, are also changed
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def learner_of(model: Any, **changes: object) -> TorchLearner:
    config = TorchTrain(warmup_versions=0, **changes)  # type: ignore[arg-type]
    return TorchLearner(model, config, temperature=1.0, versions=10, longest=9, seed=0)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_row() -> tuple[list[int], TrajectoryBatch]:
    """Return the tokens of a row, and a batch of only that row; the row's first four tokens are the prompt."""
    tokens = tokens_of(12)
    return tokens, batch_of([trajectory(tokens[:4], tokens[4:], 0, reward=1.0)])


def by_the_model(model: Any, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Return the log-probs of `tokens[1:]`, computed by transformers."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([tokens])).logits[0, :-1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_every_forward_pass_uses_the_models_own_head(name: str) -> None:
    tokens, batch = one_row()
    made, spy = learner_of(model_of(name)), Spy(uses_batch=True)
    made.objective = spy
    made.step(batch, 0)
    probe = torch.tensor(made.logprobs(tokens))
    expected = by_the_model(made.model, tokens)
    assert float(expected.std()) > 0.3  # if all log-probs were equal, no difference could show
    for found in (spy.before[0], spy.trained[0].logp_M.detach(), probe[3:]):
        torch.testing.assert_close(found, expected[3:], atol=1e-5, rtol=0)
    torch.testing.assert_close(probe, expected, atol=1e-5, rtol=0)


KNOWN = {
    "attention_mask",
    "dropout",
    "scaling",
    "is_causal",
    "position_ids",
    "sliding_window",
    "use_cache",
    "output_router_logits",
}
SINKS: Mapping[str, object] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ATTENTION: Mapping[str, Mapping[str, object]] = {  # configs with terms of attention that are large enough to matter
    "gemma2": {"attn_logit_softcapping": 1.0, "sliding_window": 8},
    "vaultgemma": SHAPE | {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gpt_oss": SHAPE | SINKS | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None},
    "gemma3_text": SINKS,
    "mistral": {"sliding_window": 8},
    "qwen2": SINKS | {"use_sliding_window": True},
    "llama": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    },
}


def written_to(folder: Path, name: str) -> Path:
    """Save a policy folder whose queries and keys are so large that every term of the attention matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**ARCHITECTURES.get(name, {}), **ATTENTION.get(name, {})})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            if any(part in key for part in ("q_proj", "k_proj", "sinks", "query_key_value", "qkv_proj", "c_attn")):
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *ATTENTION}))
def test_learner_applies_every_attention_term_of_a_config(name: str, tmp_path: Path) -> None:
    """Log-probs equal those of transformers' eager attention, which drops no term.

    The row is longer than the sliding windows, and longer than the original context length of models with scaled
    positions.
    """
    folder, tokens = written_to(tmp_path, name), torch.tensor([tokens_of(48)])
    found = load_model(folder, "float32", trained=True)
    eager = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        ours, theirs = (torch.log_softmax(model(tokens).logits[0], -1) for model in (found, eager))
    assert float(theirs.std()) > 0.3  # if all log-probs were equal, no difference could show
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *ATTENTION}))
def test_attention_wrapper_passes_on_all_arguments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a future model passes a new argument to its attention, this test fails until the argument is listed in this
    module.
    """
    given: set[str] = set()
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noted(*positional: Any, **named: Any) -> Any:
        given.update(key for key, value in named.items() if value is not None)
        return plain(*positional, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", noted)
    with torch.no_grad():
        load_model(written_to(tmp_path, name), "float32", trained=True)(torch.tensor([tokens_of(8)]), use_cache=False)
    assert given <= KNOWN, f"what scaled_dot_product_attention drops: {sorted(given - KNOWN)}"


def test_default_attention_drops_a_softcap(tmp_path: Path) -> None:
    """The weights of `written_to` are so large that the softcap changes the log-probs. Recorded runs keep the default
    attention.
    """
    folder, tokens = written_to(tmp_path, "gemma2"), torch.tensor([tokens_of(48)])
    with torch.no_grad():
        exact, default = (
            torch.log_softmax(load_model(folder, "float32", trained=True, attention=kind)(tokens).logits[0], -1)
            for kind in ("exact", "default")
        )
    assert float((exact - default).abs().max()) > 0.04


@pytest.mark.parametrize("name", sorted(DROPOUT))
def test_dropout_is_off_during_training(name: str) -> None:
    """Two passes over the same batch are equal, whatever dropout the model's config sets."""
    made = learner_of(model_of(name))
    made.objective = spy = Spy()
    made.learning_rate = lambda version: 0.0  # type: ignore[method-assign]
    for version in range(2):
        made.step(one_row()[1], version)
    assert torch.equal(spy.trained[0].logp_M, spy.trained[1].logp_M)


def test_model_without_a_separable_head_is_refused() -> None:
    """The forward pass of one model uses more than the last hidden state. The other model is its own decoder."""
    odd = model_of("llama")
    plain = type(odd).forward

    def forward(self: Any, input_ids: Tensor, **options: Any) -> Any:
        output = plain(self, input_ids=input_ids, **options)
        output.logits = output.logits * (1 + input_ids[..., None])
        return output

    odd.__class__ = type("OddForCausalLM", (type(odd),), {"forward": forward})
    for model, why in ((odd, "OddForCausalLM .* differ from"), (model_of("llama").model, "is the model itself")):
        with pytest.raises(ConfigError, match=why) as caught:
            learner_of(model)
        assert len(str(caught.value).splitlines()) == 1


def test_kl_weight_is_passed_only_if_it_is_adapted() -> None:
    """If the KL weight is not adapted, an objective uses the weight of its config."""
    for penalties, expected in (({"kl_weight": 0.5}, None), ({"kl_weight": 0.5, "kl_target": 0.1}, 0.5)):
        made, spy = learner_of(model_of("llama"), objective={"kind": "grpo", "penalties": penalties}), Spy()
        made.objective = spy
        made.step(one_row()[1], 0)
        assert spy.trained[0].kl_weight == expected


def test_logprob_distance_is_infinite_for_a_nan_or_infinity() -> None:
    """The distance is zero if both sides are NaN, or if both sides are minus infinity."""
    whole, minus = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -math.inf, 3.0])
    broken = torch.tensor([1.0, math.nan, 3.0])
    assert measure_distance(whole, whole + 0.5) == pytest.approx(0.5)
    for same in (whole, broken, minus):
        assert measure_distance(same, same) == 0.0
    for one, other in ((whole, broken), (broken, whole), (whole, minus), (minus, broken)):
        assert measure_distance(one, other) == math.inf


# --- log-probs that are computed for one chunk of tokens at a time ------------------------------------------

ROWS, LENGTH = 20, 11
HEAD = (32, VOCABULARY)  # the shape of the head's weights, transposed


class Made(TorchDispatchMode):
    """Records the number of rows of the largest logits tensor, whose shape is (rows, V) or (1, rows, V)."""

    rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
            if shape[-1:] == (VOCABULARY,) and shape[-2:] != HEAD:
                self.rows = max(self.rows, math.prod(shape[:-1]))
        return made


def pass_over(model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch, temperature: float = 0.7) -> list[Tensor]:
    """Return log-probs, entropies and all gradients of rows that run in chunks of at most `chunk` tokens."""
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * VOCABULARY * chunk)
    tokens = torch.tensor(tokens_of(ROWS * LENGTH)).reshape(ROWS, LENGTH)
    row, position = (index.reshape(-1) for index in torch.meshgrid(torch.arange(ROWS), torch.arange(LENGTH - 1)))
    model.zero_grad()
    given = TokenLogprobs(model.eval())
    inputs, targets = {"input_ids": tokens}, tokens[:, 1:].reshape(-1)
    logp, entropy = given(inputs, (row, position), targets, temperature=temperature, entropy=True)
    assert entropy is not None
    weight = torch.randn(len(logp), generator=torch.Generator().manual_seed(3))
    ((logp + 0.1 * entropy) * weight).sum().backward()
    return [logp.detach(), entropy.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt2", "phi"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_number_of_chunks_does_not_change_log_probs(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and entropies are equal with and without chunks. Only the gradients of the output head are summed in
    another order.
    """
    model = model_of(name)
    whole = pass_over(model, ROWS * LENGTH, monkeypatch)
    found = pass_over(model, chunk, monkeypatch)
    assert len(found) == len(whole) > 10
    for number, (one, other) in enumerate(zip(found, whole, strict=True)):
        near = 2e-5 if number < 2 else 5e-6 * float(other.abs().max()) + 1e-5  # float32 sums over all tokens
        torch.testing.assert_close(one, other, atol=near, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_in_memory_never_exceed_one_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of logits exceeds a chunk, neither in the forward nor in the backward pass."""
    model = model_of(name)
    for chunk, most in ((ROWS * LENGTH, ROWS * (LENGTH - 1)), (50, 50), (24, 23)):
        with Made() as made:
            pass_over(model, chunk, monkeypatch)
        assert made.rows == most
