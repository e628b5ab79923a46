"""The attention implementation that computes all that a policy's config says.

Transformers chooses PyTorch's `scaled_dot_product_attention` where a model allows it. That function drops what it does
not know: the soft-cap of Gemma 2's attention scores, say. Models with attention sinks do not allow it anyway.
"""

from __future__ import annotations

from typing import Any


def attention_of(config: Any) -> str | None:
    """The implementation for a policy of this (transformers) config; None where transformers' own choice is exact."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if capped is None else "eager"
