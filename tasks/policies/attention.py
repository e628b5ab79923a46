"""The attention implementation that computes everything that a policy's config asks for.

Transformers uses PyTorch's `scaled_dot_product_attention` if a model allows that function. The function ignores terms
that it does not support, such as the soft-cap of Gemma 2's attention scores. Models with attention sinks do not allow
the function.
"""

from __future__ import annotations

from typing import Any


def choose_attention(config: Any) -> str | None:
    """Return the attention implementation for a transformers config; None if the choice of transformers is exact."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if capped is None else "eager"
