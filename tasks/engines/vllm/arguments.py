"""Builds vLLM's configuration from the keys of `[engine]`."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.runnable import CPU_BLOCK_TOKENS, cpu_kv_cache
from rollflow.tasks.engines.speculation import build_speculation
from rollflow.tasks.engines.vllm.passed_arguments import check_names
from rollflow.tasks.policies.context import context_length

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "rollflow.tasks.engines.vllm.worker"


def build_arguments(
    config: VllmEngineConfig, policy_folder: Path, *, dtype: str, seeded: bool, told_as: str, gpu: bool
) -> dict[str, Any]:
    """Return the arguments (`AsyncEngineArgs`) with which vLLM starts. An argument that is left out has vLLM's default.

    Args:
        dtype: data type of the weights.
        seeded: requests have seeds of their own.
        told_as: `model_name` in vLLM's metrics, or "".
        gpu: the engine runs on a GPU, and not on a CPU.
    """
    kv_cache_bytes = config.kv_cache_bytes or (None if gpu else _cpu_kv_cache(config, policy_folder, dtype))
    executor = "OwnedInlineExecutor" if config.tensor_parallel == 1 else "OwnedMultiprocExecutor"
    arguments = {
        **config.vllm,
        "model": str(policy_folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "seed": secrets.randbits(31),  # replicas and restarted engines must draw different random numbers
        "dtype": dtype,
        "max_model_len": config.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": config.max_concurrent_requests,
        "max_logprobs": 1,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "enforce_eager": not gpu if config.enforce_eager is None else config.enforce_eager,
        "attention_backend": config.attention_backend,
        "quantization": None if config.quantization == "none" else config.quantization,
        "enable_prefix_caching": config.prefix_caching,
        "enable_chunked_prefill": False if seeded and not gpu else None,
        "block_size": None if gpu else CPU_BLOCK_TOKENS,
        "tensor_parallel_size": config.tensor_parallel,
        "generation_config": "vllm",  # makes vLLM ignore the policy's top_p and top_k
        "served_model_name": told_as or None,
        "worker_extension_cls": f"{WORKER}.PolicyWorker",
        "distributed_executor_backend": f"{WORKER}.{executor}",
        "additional_config": {"rollflow_owner": os.getpid()},
        **build_speculation(config),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _cpu_kv_cache(config: VllmEngineConfig, policy_folder: Path, dtype: str) -> int:
    context = config.limit_context(context_length(json.loads((policy_folder / "config.json").read_text())))
    return cpu_kv_cache(policy_folder, context, dtype)


def build_vllm_config(config: VllmEngineConfig, arguments: dict[str, Any]) -> VllmConfig:
    """Return the configuration that vLLM makes of its arguments.

    Raises:
        ConfigError: vLLM rejects an option that the recipe sets.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    check_names(config.vllm, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    own = {"engine.attention_backend": config.attention_backend, "engine.vllm": config.vllm}
    try:
        return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, NotImplementedError) as error:
        options = ", ".join(f"{key} = {value!r}" for key, value in own.items() if value)
        if not options:
            raise
        said = " ".join(line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line)
        raise ConfigError(f"{options}: vLLM rejects an option ({said}); correct or remove it") from None
