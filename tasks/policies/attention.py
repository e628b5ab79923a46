"""Chooses an attention implementation that supports all features in a policy's config.

The default of transformers, PyTorch's `scaled_dot_product_attention`, silently ignores unsupported terms, such as the
soft-cap of Gemma 2's attention scores. Models with attention sinks do not allow `scaled_dot_product_attention`.
"""

from __future__ import annotations

from typing import Any


def choose_attention(config: Any) -> str | None:
    """Return the attention implementation to request from transformers, or None if the default supports `config`."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if capped is None else "eager"
