"""The `[engine]` section: one class for each kind of engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Section, refuse


class EngineBase(Section):
    """The keys of all engines."""

    replicas: int = Field(1, gt=0, description="engines, each with the whole policy")
    slots: int = Field(256, gt=0, description="requests one engine runs at a time")
    max_new_tokens: int = Field(64, gt=0, description="longest response")
    temperature: float = Field(1.0, gt=0, description="of sampling; losses are at this temperature, too")
    in_flight: Literal["continue", "restart"] = Field(
        "continue", description="what running requests do at a weight update"
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest log-prob difference (nats) between engine and learner; default: 0.01, or 1 at bfloat16",
    )


class VllmEngineConfig(EngineBase):
    kind: Literal["vllm"] = Field("vllm", description="vLLM, on GPUs or on a CPU")
    kv_cache_bytes: int | None = Field(
        None,
        gt=0,
        description="default: on a CPU 256 MiB, or what one request needs up to 4 GiB; on a GPU vLLM's own choice",
    )
    prefix_caching: bool = Field(
        True, description="compute what responses to one prompt share once; never across versions"
    )
    tensor_parallel: int = Field(1, gt=0, description="GPUs that one engine is spread over")
    threads: int = Field(1, gt=0, description="CPU threads of one engine")


LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0  # vLLM silently raises lower values and rejects higher ones


def check_temperature(key: str, temperature: float) -> None:
    """Reject a temperature that vLLM would change, because the losses use the configured one; 0 is greedy."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        cure = f"vLLM samples at {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}; choose a temperature of that range"
        refuse(key, temperature, f'{cure}, or engine.kind = "transformers"')


class TransformersEngineConfig(EngineBase):
    kind: Literal["transformers"] = Field("transformers", description="slower, and the same bits each time")
    threads: int = Field(1, gt=0, description="CPU threads of one engine")


class TimedEngineConfig(EngineBase):
    """A latency model instead of a language model, for tests and simulation."""

    kind: Literal["timed"] = Field("timed", description="no model: drawn tokens, at a given speed")
    median_tokens: float = Field(16.0, gt=0, description="median response length")
    sigma: float = Field(1.0, ge=0, description="spread of the lognormal response length")
    correlation: float = Field(0.0, ge=0, le=1, description="of the lengths of responses to one prompt")
    lengths: tuple[int, ...] = Field((), description="measured response lengths, in place of the lognormal ones")
    seconds_per_token: float = Field(0.002, ge=0, description="of a request that runs alone")
    prefill_seconds: float = Field(0.0, ge=0, description="of a prompt, before its first token")
    update_seconds: float = Field(0.05, ge=0, description="pause for new weights")
    slowing: float = Field(0.0, ge=0, description="c: with n requests running each decodes at 1/(1 + c(n - 1) + r t)")
    reading: float = Field(0.0, ge=0, description="r: of each of the t tokens in the KV cache")
    kv_tokens: int | None = Field(None, gt=0, description="tokens the KV cache holds; default: no limit but slots")
    prompt_tokens: int = Field(0, ge=0, description="of each prompt, in the KV cache")
    prefill_seconds_per_token: float = Field(0.0, ge=0, description="that the whole engine is held up; with prefixes")
    speed: float = Field(1.0, gt=0, description="of this engine, relative to the seconds above")
    grain: int = Field(1, gt=0, description="real tokens that one simulated token, as in max_new_tokens, stands for")


EngineConfig = Annotated[VllmEngineConfig | TransformersEngineConfig | TimedEngineConfig, Field(discriminator="kind")]
