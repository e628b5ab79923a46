"""The attention implementation that computes all that a policy's config says.

Transformers uses PyTorch's `scaled_dot_product_attention` if a model allows it. That function drops terms that it does
not know, such as the soft-cap of Gemma 2's attention scores. Models with attention sinks do not allow it anyway.
"""

from __future__ import annotations

from typing import Any


def choose_attention(config: Any) -> str | None:
    """Return the implementation for a policy with this (transformers) config; None if transformers' choice is exact."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if capped is None else "eager"
