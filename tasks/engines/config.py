"""Defines the `[engine]` section of the config, with one class for each kind of inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.engines.vllm.passed_arguments import find_refusal
from rollflow.tasks.runtime.sections import Section, refuse


class EngineBase(Section):
    """The config keys that all kinds of inference engine have."""

    replicas: int = Field(
        1, gt=0, description="number of inference engines; each engine has a copy of the whole policy"
    )
    max_concurrent_requests: int = Field(
        256, gt=0, description="largest number of requests that one inference engine runs at the same time"
    )
    max_new_tokens: int = Field(
        64, gt=0, description="largest length of a response, in tokens; a longer response is cut off there"
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="sampling temperature of training responses; the training losses divide logits by the same "
        "temperature",
    )
    on_weight_update: Literal["continue", "restart"] = Field(
        "continue",
        description="what happens to a running request when the engine loads a new policy version. continue: it "
        "continues with the new weights; restart: it starts again from its prompt",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest allowed difference between the log-probs that engine and learner compute for the same "
        'fixed tokens after a weight update, in nats; default: 0.01, or 1 with policy.dtype = "bfloat16", or 2 with '
        "engine.quantization",
    )

    def limit_context(self, context: int) -> int:
        """Return the largest number of tokens of a prompt and its response, given the policy's context length."""
        return context


class VllmEngineConfig(EngineBase):
    fixed: ClassVar[Mapping[str, str]] = {"max_model_len": "the run's prompts were chosen to fit into this length"}

    kind: Literal["vllm"] = Field("vllm", description="vLLM as the inference engine, on GPUs or on a CPU")
    max_model_len: int | None = Field(
        None,
        gt=2,
        description="largest number of tokens of a request (prompt and response); default: the policy's context length",
    )
    kv_cache_bytes: int | None = Field(
        None,
        gt=0,
        description="size of the KV cache of each engine, in bytes; default on a CPU: 256 MiB, or up to 4 GiB if "
        "one request needs more; default on a GPU: vLLM chooses the size",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory that vLLM uses for weights, activations and KV cache; only on a GPU and "
        "without kv_cache_bytes; default: the default of vLLM",
    )
    kv_tokens: int | None = Field(
        None,
        gt=0,
        description='number of tokens that fit into the KV cache of one engine; only for rollout.admit_by = "kv". vLLM '
        "logs this number at its start",
    )
    prefix_caching: bool = Field(
        True,
        description="whether vLLM computes a prompt only once for all its responses; a cached prompt is never used "
        "by another policy version",
    )
    tensor_parallel: int = Field(
        1, gt=0, description="number of GPUs over which the weights of each engine are split (tensor parallelism)"
    )
    threads: int = Field(1, gt=0, description="number of CPU threads of each engine")
    enforce_eager: bool | None = Field(
        None,
        description="true: vLLM runs the model without compilation and CUDA graphs; default: false on a GPU, true on a "
        "CPU, where compilation takes about 20 seconds at the start and does not speed up small models",
    )
    attention_backend: str | None = Field(
        None,
        min_length=1,
        description='attention kernels that vLLM uses, by vLLM\'s name, e.g. "FLASH_ATTN" or "FLASHINFER"; default: '
        "vLLM chooses; a CPU has only one kind",
    )
    quantization: Literal["none", "fp8_per_channel"] = Field(
        "none",
        description="quantization of the engine's linear layers, anew for each policy version; only with "
        'policy.dtype = "bfloat16". fp8_per_channel: FP8, with a scale for each output channel of the weights and for '
        "each token",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments of vLLM's AsyncEngineArgs, which are passed on as they are, e.g. "
        "{ max_num_batched_tokens = 8192 }; arguments that would break a guarantee of rollflow are rejected",
    )
    speculation: Literal["none", "ngram", "suffix", "mtp"] = Field(
        "none",
        description="source of drafted tokens, which vLLM verifies several at a time (speculative decoding). "
        "suffix: past responses to the same prompt; ngram: repetitions in prompt and response; mtp: heads of the "
        "policy (rejected, because no learner trains them yet)",
    )
    draft_tokens: int = Field(
        8, ge=1, le=64, description="largest number of tokens that an engine drafts for a response in one step"
    )

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        if self.speculation == "mtp":
            cure = (
                "no learner trains or publishes heads that predict several tokens, so an engine would draft with "
                'random heads; choose "suffix" or "ngram"'
            )
            refuse("engine.speculation", self.speculation, cure)
        return self

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        """Reject options of vLLM that contradict each other, or that would break a guarantee of rollflow."""
        if self.max_model_len is not None and self.max_model_len <= self.max_new_tokens:
            least = self.max_new_tokens + 1
            cure = (
                f"a prompt needs room beside a response of engine.max_new_tokens = {self.max_new_tokens}; choose "
                f"{least} or more, or lower engine.max_new_tokens"
            )
            refuse("engine.max_model_len", self.max_model_len, cure)
        if self.gpu_memory_utilization is not None and self.kv_cache_bytes is not None:
            cure = f"vLLM ignores it beside engine.kv_cache_bytes = {self.kv_cache_bytes}; remove one of the two keys"
            refuse("engine.gpu_memory_utilization", self.gpu_memory_utilization, cure)
        if refused := find_refusal(self.vllm):
            refuse(*refused)
        return self

    def limit_context(self, context: int) -> int:
        return context if self.max_model_len is None else min(context, self.max_model_len)


# vLLM raises lower temperatures to 0.01 and rejects temperatures above 2.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0


def check_temperature(key: str, temperature: float) -> None:
    """Reject a sampling temperature that vLLM would silently change."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        cure = (
            f"vLLM supports temperatures from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}; choose a "
            "temperature in this range"
        )
        refuse(key, temperature, f'{cure}, or engine.kind = "transformers"')


class TransformersEngineConfig(EngineBase):
    kind: Literal["transformers"] = Field(
        "transformers",
        description="Hugging Face transformers as the inference engine, which is slower than vLLM but reproducible "
        "bit for bit",
    )
    threads: int = Field(1, gt=0, description="number of CPU threads of each engine")


class TimedEngineConfig(EngineBase):
    """A simulated engine for tests and planning, which has the latency of a language model and emits random tokens."""

    kind: Literal["timed"] = Field(
        "timed", description="simulated engine without a model, which emits random tokens at a configured speed"
    )
    median_tokens: float = Field(16.0, gt=0, description="median length of a simulated response, in tokens")
    sigma: float = Field(
        1.0,
        ge=0,
        description="sigma of the lognormal distribution of response lengths; 0: every response has the median length",
    )
    correlation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="correlation between the lengths of the responses to one prompt, from 0 (independent) to 1 (equal)",
    )
    lengths: tuple[int, ...] = Field(
        (),
        description="list of measured response lengths, in tokens, from which lengths are drawn in place of the "
        "lognormal distribution",
    )
    seconds_per_token: float = Field(
        0.002,
        ge=0,
        description="seconds that an engine takes to generate one token if only one request runs on the engine",
    )
    prefill_seconds: float = Field(
        0.0, ge=0, description="seconds that an engine takes to process a prompt before the first token of the response"
    )
    update_seconds: float = Field(
        0.05, ge=0, description="seconds for which an engine pauses to load the weights of a new policy version"
    )
    batch_slowdown: float = Field(
        0.0,
        ge=0,
        description="slowdown c of a request by each other running request: with n running requests and t tokens in "
        "the KV cache, a token takes 1 + c(n - 1) + r t times as long as at full speed; r is kv_read_cost",
    )
    kv_read_cost: float = Field(
        0.0,
        ge=0,
        description="slowdown r of every request for each token in the KV cache, in the formula of batch_slowdown",
    )
    kv_tokens: int | None = Field(
        None, gt=0, description="capacity of the KV cache of one engine, in tokens; default: no limit"
    )
    prompt_tokens: int = Field(0, ge=0, description="number of tokens that each prompt occupies in the KV cache")
    prefill_seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="seconds for which an engine stops all its requests for each prompt token that it computes and, "
        "after a weight update, for each token in its KV cache",
    )
    speed: float = Field(
        1.0,
        gt=0,
        description="speed factor of an engine: the seconds per token and per prompt are divided by this number",
    )
    tokens_per_tick: int = Field(
        1,
        gt=0,
        description="number of real tokens that one simulated token stands for; engine.max_new_tokens is given in "
        "simulated tokens",
    )


EngineConfig = Annotated[VllmEngineConfig | TransformersEngineConfig | TimedEngineConfig, Field(discriminator="kind")]
