"""Options of a recipe arrive in the real vLLM, and its log-probs remain those of the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.vllm.arguments import build_arguments, build_vllm_config
from rollflow.tasks.engines.vllm.engine import VllmEngine, _environment
from rollflow.tasks.engines.vllm.passed_arguments import read_names
from rollflow.tasks.policies.config import ColdStart, PolicyConfig
from rollflow.tasks.run.config import RunConfig
from tests.support.tiny_policy import make_policy, make_weights, reference_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

PROBE = tuple(range(3, 66))
PROMPT = tuple(range(3, 23))


@pytest.fixture
def _vllm() -> Iterator[None]:
    with _environment(1):
        yield


def configured(folder: Path, **keys: Any) -> Any:
    """Return the configuration that vLLM makes of config keys."""
    config = VllmEngineConfig.model_validate(keys)
    arguments = build_arguments(config, make_policy(folder), dtype="float32", seeded=False, told_as="", gpu=False)
    return build_vllm_config(config, arguments)


@pytest.mark.usefixtures("_vllm")
def test_options_reach_the_configuration_of_vllm(tmp_path: Path) -> None:
    default = configured(tmp_path)
    assert default.model_config.max_model_len == 256
    assert default.model_config.enforce_eager
    assert default.attention_config.backend is None
    made = configured(
        tmp_path,
        max_model_len=100,
        enforce_eager=False,
        attention_backend="CPU_ATTN",
        vllm={"max_num_batched_tokens": 512, "compilation_config": {"mode": 0}, "watermark": 0.25},
    )
    assert made.model_config.max_model_len == 100
    assert not made.model_config.enforce_eager
    assert made.attention_config.backend.name == "CPU_ATTN"
    assert (made.scheduler_config.max_num_batched_tokens, made.scheduler_config.watermark) == (512, 0.25)
    assert made.compilation_config.mode == 0


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"attention_backend": "FLASH"}, "engine.attention_backend = 'FLASH': vLLM rejects an option ("),
        ({"vllm": {"max_num_batched_tokens": 8}}, "engine.vllm = {'max_num_batched_tokens': 8}: vLLM rejects an"),
        ({"vllm": {"watermark": "much"}}, "engine.vllm = {'watermark': 'much'}: vLLM rejects an option ("),
        ({"vllm": {"compilation_config": {"mod": 0}}}, "engine.vllm = {'compilation_config': {'mod': 0}}: vLLM"),
        ({"vllm": {"max_batched_tokens": 8}}, "engine.vllm.max_batched_tokens = 8: the installed vLLM has no such"),
    ],
)
def test_option_that_vllm_rejects_is_named(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, **keys)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


def test_argument_names_are_read_from_the_source_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert sorted(read_names()) == sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))


async def test_gpu_memory_for_an_engine_on_a_cpu_is_refused(tmp_path: Path) -> None:
    engine = VllmEngine(VllmEngineConfig(gpu_memory_utilization=0.5), make_policy(tmp_path))
    with pytest.raises(ConfigError, match=r"^engine.gpu_memory_utilization = 0.5: the machine has no GPU; remove"):
        await engine.start()


@pytest.mark.parametrize(
    "keys",
    [
        {"max_concurrent_requests": 16, "vllm": {"max_num_batched_tokens": 16}},
        {"enforce_eager": False},
    ],
    ids=["small steps", "compiled"],
)
async def test_engine_with_options_has_the_log_probs_of_the_policy(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Requests fill the longest context, longer ones are refused, and the probe may be longer than a step of vLLM."""
    config = VllmEngineConfig.model_validate({"max_model_len": 64, "max_new_tokens": 44, **keys})
    engine = VllmEngine(config, make_policy(tmp_path / "policy"))
    weights = make_weights(tmp_path / "0", seed=0)
    await engine.start()
    try:
        await engine.suspend("continue")
        await engine.update(0, weights)
        assert await engine.logprobs(PROBE) == pytest.approx(reference_logprobs(weights, PROBE), abs=1e-4)
        await engine.resume()
        assert await engine.logprobs(PROBE) == pytest.approx(reference_logprobs(weights, PROBE), abs=1e-4)
        assert (await generate(engine, "full", 44)).ending in (StopReason.LENGTH, StopReason.STOP)
        made = await generate(engine, "longer", 300)
        assert len(PROMPT) + len(made.tokens) <= 64
        expected = reference_logprobs(weights, PROMPT + made.tokens)[-len(made.tokens) :]
        assert made.logprobs == pytest.approx(expected, abs=1e-4)
        with pytest.raises(ValueError, match="64"):
            await engine.generate(GenerationRequest("long", ModelInput.of(tuple(range(3, 67))), 1))
    finally:
        await engine.close()


async def generate(engine: VllmEngine, id: str, longest: int) -> Any:
    return await engine.generate(GenerationRequest(id, ModelInput.of(PROMPT), longest))


async def test_quantized_engine_quantizes_each_version(tmp_path: Path) -> None:
    """Weights that are loaded again give the same log-probs, and stale ones would exceed the probe's tolerance.

    The engine's log-probs are nearer to those of a model that is rounded to FP8 than to those of the learner. Two
    computations in FP8 differ by rounding: 0.1 nats in the mean, half as much as from the learner.
    """
    config = VllmEngineConfig(quantization="fp8_per_channel")
    tolerance = RunConfig(policy=PolicyConfig(cold_start=ColdStart(), dtype="bfloat16"), engine=config).probe_tolerance
    engine = VllmEngine(config, make_policy(tmp_path / "policy"), dtype="bfloat16")
    weights = [make_weights(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    found = []
    await engine.start()
    try:
        await engine.suspend("continue")
        for version in range(4):
            await engine.update(version, weights[version % 2])
            found.append(await engine.logprobs(PROBE))
            learner, stale = (
                reference_logprobs(one, PROBE, dtype="bfloat16") for one in (weights * 2)[version % 2 :][:2]
            )
            assert max(differences(found[-1], learner)) < tolerance < max(differences(found[-1], stale))
            rounded = quantized_logprobs(weights[version % 2], PROBE)
            assert mean(differences(found[-1], rounded)) < 0.75 * mean(differences(found[-1], learner))
        assert found[:2] == found[2:]
        await engine.resume()
        made = await generate(engine, "quantized", 40)
        again = await engine.logprobs(PROMPT + made.tokens)
        assert again is not None
        assert mean(differences(made.logprobs, again[-len(made.tokens) :])) < 0.1
    finally:
        await engine.close()


def differences(found: Sequence[float] | None, expected: Sequence[float]) -> list[float]:
    assert found is not None
    return [abs(one - other) for one, other in zip(found, expected, strict=True)]


def quantized_logprobs(weights: Path, tokens: Sequence[int]) -> list[float]:
    """Compute the log-probs of tokens[1:] with weights in FP8 (a scale per output channel) and inputs in FP8 (a scale
    per token) in each linear layer but the head.
    """
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = round_to_fp8(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: (round_to_fp8(inputs[0]),))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0, :-1].float(), -1)
    found: list[float] = logprobs.gather(-1, torch.tensor(list(tokens[1:])).unsqueeze(-1)).squeeze(-1).tolist()
    return found


def round_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round values to FP8, with a scale for each row."""
    scale = values.float().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)
