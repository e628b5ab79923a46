"""What the transformers engine can run, by a policy's config alone: asked before a run begins. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
