"""The `[engine]` section: one class for each kind of engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Section, refuse


class EngineBase(Section):
    """The keys of all engines."""

    replicas: int = Field(1, gt=0, description="number of engines; each holds the whole policy")
    max_concurrent_requests: int = Field(
        256, gt=0, description="largest number of requests that one engine runs at a time"
    )
    max_new_tokens: int = Field(64, gt=0, description="largest length of a response, in tokens")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; the losses use it, too")
    on_weight_update: Literal["continue", "restart"] = Field(
        "continue",
        description="what happens to running requests at a weight update: they continue under the new weights, or "
        "restart",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest allowed difference between the log-probs of engine and learner, in nats; default: 0.01, "
        "or 1 with policy.dtype = bfloat16",
    )


class VllmEngineConfig(EngineBase):
    kind: Literal["vllm"] = Field("vllm", description="vLLM, on GPUs or on a CPU")
    kv_cache_bytes: int | None = Field(
        None,
        gt=0,
        description="size of the KV cache, in bytes; default on a CPU: 256 MiB, or as much as one request needs, up "
        "to 4 GiB; default on a GPU: as vLLM decides",
    )
    prefix_caching: bool = Field(
        True, description="compute a prompt once for all its responses; nothing is reused across versions"
    )
    tensor_parallel: int = Field(1, gt=0, description="GPUs that one engine is split over")
    threads: int = Field(1, gt=0, description="CPU threads of each engine")


LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0  # vLLM silently raises lower temperatures and rejects higher ones


def check_temperature(key: str, temperature: float) -> None:
    """Reject a temperature that vLLM would change, because losses use the configured temperature; 0 is greedy."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        cure = f"vLLM samples at {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}; choose a temperature of that range"
        refuse(key, temperature, f'{cure}, or engine.kind = "transformers"')


class TransformersEngineConfig(EngineBase):
    kind: Literal["transformers"] = Field(
        "transformers", description="Hugging Face transformers: slower, but reproducible bit for bit"
    )
    threads: int = Field(1, gt=0, description="CPU threads of each engine")


class TimedEngineConfig(EngineBase):
    """A latency model instead of a language model, for tests and simulation."""

    kind: Literal["timed"] = Field("timed", description="no model: random tokens at a given speed")
    median_tokens: float = Field(16.0, gt=0, description="median length of a response, in tokens")
    sigma: float = Field(1.0, ge=0, description="sigma of the lognormal response length")
    correlation: float = Field(0.0, ge=0, le=1, description="correlation of the lengths of responses to one prompt")
    lengths: tuple[int, ...] = Field((), description="measured response lengths; they replace the lognormal ones")
    seconds_per_token: float = Field(0.002, ge=0, description="seconds for each token of a request that runs alone")
    prefill_seconds: float = Field(0.0, ge=0, description="seconds for each prompt, before its first token")
    update_seconds: float = Field(0.05, ge=0, description="seconds that an engine pauses for new weights")
    batch_slowdown: float = Field(
        0.0,
        ge=0,
        description="c: with n running requests and t tokens in the KV cache, each request decodes 1 + c(n - 1) + r t "
        "times slower than alone",
    )
    kv_read_cost: float = Field(
        0.0, ge=0, description="r in the formula of batch_slowdown: the cost of reading one token of the KV cache"
    )
    kv_tokens: int | None = Field(None, gt=0, description="capacity of the KV cache, in tokens; default: no limit")
    prompt_tokens: int = Field(0, ge=0, description="tokens of each prompt in the KV cache")
    prefill_seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="seconds that the whole engine stops for each token that enters the KV cache without being "
        "sampled: of a prompt or a prefix, and of every request after an update",
    )
    speed: float = Field(1.0, gt=0, description="speed of this engine, relative to the seconds above")
    tokens_per_tick: int = Field(
        1, gt=0, description="real tokens that one simulated token stands for; max_new_tokens counts simulated tokens"
    )


EngineConfig = Annotated[VllmEngineConfig | TransformersEngineConfig | TimedEngineConfig, Field(discriminator="kind")]
