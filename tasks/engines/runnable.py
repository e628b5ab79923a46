"""Which policies an engine can run, judged by the policy's config alone before a run begins. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError

CPU_KV_CACHE_BYTES = 256 << 20  # where one request needs no more
LARGEST_CPU_KV_CACHE = 4 << 30  # what a machine is not asked for unless the recipe says so
CPU_BLOCK_TOKENS = 32  # the smallest block of its attention kernel: only whole blocks of a prompt are shared
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # for vLLM's attention without a GPU


def check_head_size(folder: Path, named: str, has_gpu: Callable[[], object]) -> None:
    """Refuse a head size that vLLM accepts without a GPU, and crashes on at the first request.

    `named` is the policy as the user gave it.

    Raises:
        ConfigError: vLLM's CPU attention has no kernel for it.
    """
    policy = json.loads((folder / "config.json").read_text())
    policy = policy.get("text_config") or policy
    width, heads = policy.get("hidden_size"), policy.get("num_attention_heads")
    size = policy.get("head_dim") or (width // heads if width and heads else None)
    if size is not None and size not in CPU_HEAD_SIZES and not has_gpu():
        raise ConfigError(
            f"{named}: vLLM's CPU attention has no kernel for heads of size {size}, only for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; choose hidden_size / heads among them, or engine.kind = "
            "'transformers'"
        )


def kv_cache_need(folder: Path, context: int, dtype: str) -> int:
    """Return the bytes that vLLM's cache needs to start: one request as long as the context, and a block.

    The result is 0 if not all layers attend to all earlier tokens: such caches have other sizes.
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
    """Return the bytes of vLLM's cache without a GPU, where the recipe names none: one request fits, up to 4 GiB."""
    need = kv_cache_need(folder, context, dtype)
    return max(CPU_KV_CACHE_BYTES, need if need <= LARGEST_CPU_KV_CACHE else 0)


def hindrance(config: Any) -> str | None:
    """Why it cannot run a policy of this (transformers) config; None if it can.

    Its attention state has one shape for all layers (`fixed_shape.py`): all tokens before, of heads that are named.
    """
    if getattr(config, "num_key_value_heads", None) is None:
        return "its config names no num_key_value_heads"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "a layer does not see all tokens before"
    return None


def hindrance_of(folder: Path) -> str | None:
    """A policy folder's kind and why it cannot be run; None if it can.

    Raises:
        ValueError: transformers cannot read its config.json.
    """
    from transformers import AutoConfig

    try:
        policy = AutoConfig.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - whatever its class says of what stands there
        said = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"transformers cannot read its config.json ({said})") from None
    why = hindrance(policy)
    return None if why is None else f"a {policy.model_type} ({why})"
