"""Checks before a run that the run's inference engine can run the policy and the recipe's prompts."""

from __future__ import annotations

from pathlib import Path

from rollflow.flows.policies.earlier_version import name_policy
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.runnable import (
    check_gpu_memory,
    check_head_size,
    cpu_kv_cache,
    find_folder_hindrance,
    kv_cache_need,
)
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.config import RunConfig


def check_room(config: RunConfig, tokenizer: PolicyTokenizer) -> None:
    """Reject a context of the engine that is longer than the policy's context, and a limit on response tokens that is
    not smaller than the policy's context length, because no prompt would fit.
    """
    asked = config.engine.max_model_len if isinstance(config.engine, VllmEngineConfig) else None
    if asked is not None and asked > tokenizer.context:
        raise ConfigError(
            f"engine.max_model_len = {asked}: the policy's context has only {tokenizer.context} tokens; choose "
            f"{tokenizer.context} or less, or remove the key"
        )
    if tokenizer.context <= config.engine.max_new_tokens:
        raise ConfigError(
            f"engine.max_new_tokens = {config.engine.max_new_tokens}: the policy's context has only "
            f"{tokenizer.context} tokens; choose a smaller number"
        )


def check_engine(config: RunConfig, folder: Path) -> None:
    """Reject a policy that the inference engine cannot run."""
    cold, named = config.policy.cold_start, name_policy(config.policy)
    if isinstance(config.engine, VllmEngineConfig) and config.cluster.address == "auto":
        check_head_size(folder, named, cluster.count_machine_gpus)
        check_gpu_memory(config.engine, cluster.count_machine_gpus)
    trains = isinstance(config.engine, TransformersEngineConfig)
    if cold is not None or not (trains or config.evaluation.engine == "transformers"):
        return
    try:
        why = find_folder_hindrance(folder)
    except ValueError as error:
        raise ConfigError(f"{named}: {error}; save the policy again") from None
    if why is not None:
        cure = f'set {"engine.kind" if trains else "evaluation.engine"} = "{"vllm" if trains else "own"}"'
        raise ConfigError(f"{named}: the transformers engine cannot run {why}; {cure}, or choose another policy")


def check_kv_cache(config: RunConfig, folder: Path, tokenizer: PolicyTokenizer) -> None:
    """Reject a KV cache that is too small for one request, because vLLM would not start with it."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig) or config.cluster.address != "auto":
        return
    context = engine.limit_context(tokenizer.context)
    need = kv_cache_need(folder, context, config.policy.dtype)
    have = engine.kv_cache_bytes or cpu_kv_cache(folder, context, config.policy.dtype)
    if need > have and not cluster.count_machine_gpus():
        which = "the policy's context" if engine.max_model_len is None else "engine.max_model_len"
        raise ConfigError(
            f"engine.kv_cache_bytes = {have}: vLLM needs {need} bytes for one request of {context} tokens, {which}; "
            f"set engine.kv_cache_bytes to {need} or more, or choose a smaller engine.max_model_len"
        )
