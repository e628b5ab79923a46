"""Checks whether an inference engine can run a policy, from the policy's config alone, before a run starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import VllmEngineConfig

CPU_KV_CACHE_BYTES = 256 << 20  # default size of vLLM's KV cache on a CPU, in bytes, unless one request needs more
LARGEST_CPU_KV_CACHE = 4 << 30  # largest default size of vLLM's KV cache on a CPU, in bytes
CPU_BLOCK_TOKENS = 32  # number of tokens in the smallest KV cache block of vLLM's CPU attention
# sizes of attention heads that vLLM's CPU attention supports
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_head_size(folder: Path, named: str, has_gpu: Callable[[], object]) -> None:
    """Reject a policy whose attention heads have a size that vLLM on a CPU does not support.

    vLLM would start with the policy and crash at the first request.

    `named` is the name of the policy in the error message.

    Raises:
        ConfigError: vLLM's CPU attention has no kernel for the policy's head size.
    """
    policy = json.loads((folder / "config.json").read_text())
    policy = policy.get("text_config") or policy
    width, heads = policy.get("hidden_size"), policy.get("num_attention_heads")
    size = policy.get("head_dim") or (width // heads if width and heads else None)
    if size is not None and size not in CPU_HEAD_SIZES and not has_gpu():
        raise ConfigError(
            f"{named}: vLLM's CPU attention has no kernel for attention heads of size {size}, only for sizes "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; choose hidden_size / heads among these sizes, or set "
            "engine.kind = 'transformers'"
        )


def check_gpu_memory(config: VllmEngineConfig, has_gpu: Callable[[], object]) -> None:
    """Reject a share of GPU memory for an engine on a CPU, where vLLM would ignore it.

    Raises:
        ConfigError: the key `engine.gpu_memory_utilization` is set, and the machine has no GPU.
    """
    if config.gpu_memory_utilization is not None and not has_gpu():
        raise ConfigError(
            f"engine.gpu_memory_utilization = {config.gpu_memory_utilization}: the machine has no GPU; remove the key, "
            "or set engine.kv_cache_bytes, the size of the KV cache on a CPU"
        )


def kv_cache_need(folder: Path, context: int, dtype: str) -> int:
    """Return the size, in bytes, of the smallest KV cache with which vLLM starts.

    The smallest KV cache has room for one request of the largest length, and one block.

    If a layer does not attend to all earlier tokens, the size is unknown and the result is 0.
    """
    policy = json.loads((folder / "config.json").read_text())
    policy = policy.get("text_config") or policy
    layers, width, heads = (policy.get(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    odd = policy.get("kv_lora_rank") or policy.get("sliding_window") or policy.get("layer_types")
    if odd or not (layers and width and heads):
        return 0
    kv_heads, size = policy.get("num_key_value_heads") or heads, policy.get("head_dim") or width // heads
    tokens = (-(-context // CPU_BLOCK_TOKENS) + 1) * CPU_BLOCK_TOKENS
    return 2 * tokens * int(layers * kv_heads * size) * (2 if dtype == "bfloat16" else 4)


def cpu_kv_cache(folder: Path, context: int, dtype: str) -> int:
    """Return the default size, in bytes, of vLLM's KV cache on a CPU: enough for one request, but at most 4 GiB."""
    need = kv_cache_need(folder, context, dtype)
    return max(CPU_KV_CACHE_BYTES, need if need <= LARGEST_CPU_KV_CACHE else 0)


def find_hindrance(config: Any) -> str | None:
    """Return why the transformers engine cannot run a policy with this config, or None if it can.

    The engine needs a KV cache of the same shape in all layers (see `fixed_shape`), so every layer must have full
    attention.
    """
    if getattr(config, "num_key_value_heads", None) is None:
        return "its config.json does not name num_key_value_heads"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "one of its layers does not attend to all earlier tokens"
    return None


def find_folder_hindrance(folder: Path) -> str | None:
    """Return a policy's model type and the reason why the transformers engine cannot run the policy, or None if it can.

    Raises:
        ValueError: the library transformers cannot read the folder's config.json.
    """
    from transformers import AutoConfig

    try:
        policy = AutoConfig.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - transformers raises many classes for a config that it cannot read
        said = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"transformers cannot read the policy's config.json ({said})") from None
    why = find_hindrance(policy)
    return None if why is None else f"a model of type {policy.model_type} ({why})"
