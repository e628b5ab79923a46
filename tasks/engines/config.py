"""Defines the `[engine]` section of the config, with one class for each kind of inference engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Section, refuse


class EngineBase(Section):
    """The config keys that all kinds of inference engine have."""

    replicas: int = Field(1, gt=0, description="number of engines; each engine has a copy of the whole policy")
    max_concurrent_requests: int = Field(
        256, gt=0, description="largest number of requests that one engine runs at a time"
    )
    max_new_tokens: int = Field(64, gt=0, description="largest length of a response, in tokens")
    temperature: float = Field(
        1.0,
        gt=0,
        description="temperature at which responses are sampled; the losses divide logits by the same temperature",
    )
    on_weight_update: Literal["continue", "restart"] = Field(
        "continue",
        description="what happens to a running request when the weights are updated: it continues under the new "
        "weights, or it restarts",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest allowed difference between the engine's and the learner's log-probs, in nats; default: "
        "0.01, or 1 with policy.dtype = bfloat16",
    )


class VllmEngineConfig(EngineBase):
    kind: Literal["vllm"] = Field("vllm", description="the engine is vLLM, on GPUs or on a CPU")
    kv_cache_bytes: int | None = Field(
        None,
        gt=0,
        description="size of the KV cache, in bytes; default on a CPU: 256 MiB, or more if one request needs more, "
        "up to 4 GiB; default on a GPU: vLLM decides",
    )
    prefix_caching: bool = Field(
        True,
        description="whether a prompt is computed only once for all its responses; no cached prompt is used across "
        "policy versions",
    )
    tensor_parallel: int = Field(1, gt=0, description="number of GPUs that each engine is split over")
    threads: int = Field(1, gt=0, description="number of CPU threads of each engine")


# vLLM raises lower temperatures to 0.01 and rejects temperatures above 2
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0


def check_temperature(key: str, temperature: float) -> None:
    """Reject a sampling temperature that vLLM would silently change, so that the losses use the right temperature."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        cure = (
            f"vLLM supports temperatures from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}; choose a "
            "temperature in this range"
        )
        refuse(key, temperature, f'{cure}, or engine.kind = "transformers"')


class TransformersEngineConfig(EngineBase):
    kind: Literal["transformers"] = Field(
        "transformers",
        description="the engine is Hugging Face transformers: slower than vLLM, but reproducible bit for bit",
    )
    threads: int = Field(1, gt=0, description="number of CPU threads of each engine")


class TimedEngineConfig(EngineBase):
    """An engine for tests and simulation that models only the latency of a language model."""

    kind: Literal["timed"] = Field("timed", description="no model: the engine emits random tokens at a given speed")
    median_tokens: float = Field(16.0, gt=0, description="median length of a response, in tokens")
    sigma: float = Field(1.0, ge=0, description="sigma of the lognormal distribution of response lengths")
    correlation: float = Field(0.0, ge=0, le=1, description="correlation of the lengths of responses to one prompt")
    lengths: tuple[int, ...] = Field(
        (), description="measured response lengths, in tokens; they replace the lognormal lengths"
    )
    seconds_per_token: float = Field(
        0.002, ge=0, description="seconds that an engine takes for each token of a request that runs alone"
    )
    prefill_seconds: float = Field(
        0.0, ge=0, description="seconds that an engine takes for each prompt, before the first token of the response"
    )
    update_seconds: float = Field(0.05, ge=0, description="seconds that an engine pauses to load new weights")
    batch_slowdown: float = Field(
        0.0,
        ge=0,
        description="c in this formula: with n running requests and t tokens in the KV cache, a request decodes 1 + "
        "c(n - 1) + r t times slower than alone (r is kv_read_cost)",
    )
    kv_read_cost: float = Field(
        0.0,
        ge=0,
        description="r in the formula of batch_slowdown: slowdown of every request for each token in the KV cache",
    )
    kv_tokens: int | None = Field(None, gt=0, description="capacity of the KV cache, in tokens; default: no limit")
    prompt_tokens: int = Field(0, ge=0, description="number of tokens that each prompt takes in the KV cache")
    prefill_seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="seconds that the whole engine stops for each prompt token that it computes, and, after a "
        "weight update, for each token in its KV cache",
    )
    speed: float = Field(
        1.0, gt=0, description="speed of this engine, by which its seconds per token and per prompt are divided"
    )
    tokens_per_tick: int = Field(
        1,
        gt=0,
        description="number of real tokens that one simulated token stands for; max_new_tokens counts simulated tokens",
    )


EngineConfig = Annotated[VllmEngineConfig | TransformersEngineConfig | TimedEngineConfig, Field(discriminator="kind")]
