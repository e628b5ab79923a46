"""Tests that the engine and the cold start use the model's own output head: log-probs and loss equal those of the
model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.base import split_buffers
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.config import TransformersEngineConfig
from rollflow.tasks.engines.transformers import TransformersEngine
from rollflow.tasks.policies.attention import choose_attention
from rollflow.tasks.policies.cold_start import answer_loss
from rollflow.tasks.policies.demonstrations import Demonstration
from rollflow.tasks.policies.head import LMHead
from tests.contracts.test_token_logprobs import ARCHITECTURES, by_the_model, learner_of, model_of, tokens_of

# architectures whose logits have a soft-cap or a scale
SHAPED = ("gemma2", "gemma3_text", "granite", "granitemoe", "cohere", "cohere2")
OTHER_CACHE = {"gpt_neox", "opt", "gpt2"}  # the engine's attention cache does not support these
FULL: Mapping[str, object] = {"layer_types": ["full_attention"] * 2}  # the only attention that the engine supports
LENGTH = 24


def policy_of(name: str, folder: Path) -> Any:
    """Build a model and return it; write its folder, with weights as a learner publishes them."""
    model = model_of(name, FULL if hasattr(model_of(name).config, "layer_types") else {})
    model.set_attn_implementation(choose_attention(model.config) or "sdpa")
    model.config.save_pretrained(folder)
    for path, data in learner_of(model).weights().items():
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"".join(split_buffers(data)))
    return model.eval()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - OTHER_CACHE))
async def test_engine_records_the_models_own_log_probs(name: str, tmp_path: Path) -> None:
    model, prompts = policy_of(name, tmp_path), [tokens_of(3, seed=1), tokens_of(20, seed=2)]
    engine = TransformersEngine(TransformersEngineConfig(), tmp_path)
    await engine.start()
    await engine.update(0, tmp_path / "weights")
    for temperature in (1.0, 0.5):
        for prompt in prompts:
            made = await engine.generate(GenerationRequest("one", ModelInput.of(prompt), LENGTH, temperature, seed=3))
            expected = by_the_model(model, [*prompt, *made.tokens], temperature)[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(list(made.logprobs)), expected, atol=1e-4, rtol=0)
    await engine.close()


def plain_loss(model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Compute the loss one row at a time, as transformers does."""
    parts = [by_the_model(model, [*prompt, *answer])[len(prompt) - 1 :] for prompt, answer in pairs]
    return -torch.cat(parts).mean()


@pytest.mark.parametrize("name", ["llama", *SHAPED])
def test_cold_start_trains_on_the_models_own_log_probs(name: str) -> None:
    model, pairs = model_of(name).eval(), [(tokens_of(5, 1), tokens_of(4, 2)), (tokens_of(3, 3), tokens_of(7, 4))]
    loss = answer_loss(model.get_decoder(), LMHead(model), [Demonstration(*pair) for pair in pairs])
    torch.testing.assert_close(loss, plain_loss(model, pairs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 64])  # numbers of rows in a prefill and in a decode
def test_lm_head_gives_the_same_bits_as_the_models_own_head(name: str, dtype: torch.dtype, rows: int) -> None:
    """Older recorded runs, whose logits were a plain matrix product, can be reproduced only if `LMHead` gives the same
    bits.
    """
    model = model_of(name).to(dtype).eval()
    hidden = torch.randn(rows, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        assert torch.equal(LMHead(model)(hidden), model.get_output_embeddings()(hidden))
