"""Attention over prefix trees on a CPU: each token attends to its path, the tokens from the root of the tree to the
token itself (see `objectives/prefixes`).

Attention is computed block by block (`AttentionBlocks`). The keys to which a token attends are divided among several
blocks. The results of the blocks are merged by their normalizers: if a block gives the mean o of values with the
log-sum-exp l of scores, then two blocks together give

    o = o1 + sigmoid(l2 - l1) (o2 - o1)        l = log(exp(l1) + exp(l2))

The backward pass of a block needs only the merged o and l, because the weight of a score s is exp(s - l) in every block
(Dao et al. 2022, FlashAttention, section 3.1; Liu et al. 2023, Ring Attention).

In shapes, N is the number of tokens, h the number of heads, and D the size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rollflow.tasks.objectives.prefixes.blocks import AttentionBlocks, PaddedTrees, Span

NAME = "rollflow_paths"  # the name under which transformers finds the attention of this module
EXACT = "sdpa"  # name of the attention in transformers that this module uses if no blocks are given
IGNORED = {"is_causal", "output_attentions", "output_router_logits", "position_ids", "use_cache"}


def use_path_attention(model: Any) -> bool:
    """Make a model compute attention with this module, and return True. If the model is on a GPU, or does not use
    torch's `scaled_dot_product_attention`, change nothing and return False.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if model.device.type != "cpu" or model.config._attn_implementation not in (EXACT, NAME):
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend_by_path)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[EXACT])
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def attend_by_path(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefix_blocks: AttentionBlocks | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, of shape (1, N, h, D). Without `prefix_blocks`, compute the attention as the
    library transformers does.

    Raises:
        ValueError: the layer's attention has a term that this module does not know.
    """
    if prefix_blocks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = module, query, key, value, attention_mask
        found: tuple[Tensor, None] = sdpa_attention_forward(*given, dropout=dropout, scaling=scaling, **others)
        return found
    unknown = {name for name, term in others.items() if term is not None} - IGNORED
    if unknown or dropout:
        raise ValueError(
            f"attention with shared prefixes (along paths) does not support {sorted(unknown) or 'dropout'}"
        )
    wide, narrow = query.shape[-1], value.shape[-1]
    scale = wide**-0.5 if scaling is None else scaling
    value = value if wide == narrow else pad(value, (0, wide - narrow))
    out = _PathAttention.apply(query, key, value, prefix_blocks, scale)  # type: ignore[no-untyped-call]
    return out[..., :narrow].transpose(1, 2).contiguous(), None


class _PathAttention(torch.autograd.Function):
    """See the module's docstring. The tensors have the shape (1, h, N, D); keys may have fewer heads than queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: AttentionBlocks, scale: float) -> Tensor:
        keys, values = (_widen(given, query.shape[1]) for given in (key, value))
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        total: Tensor | None = None
        for span in blocks.causal:
            part = _flash(_at(query, span), _at(keys, span), _at(values, span), scale=scale, causal=True)
            total = _new_total(out, part[1]) if total is None else total
            _at(out, span).copy_(part[0])
            _at(total, span).copy_(part[1])
        for trees in blocks.padded:
            part = _flash(*(_gather(given, trees) for given in (query, keys, values)), scale=scale, mask=trees.mask)
            total = _new_total(out, part[1]) if total is None else total
            for into, found in zip((out, total), part, strict=True):
                _scatter(into, found, trees)
        assert total is not None
        for span, seen in blocks.paths:
            found, sums = _flash(_at(query, span), _at(keys, seen), _at(values, seen), scale=scale)
            before = _at(total, span)
            _at(out, span).lerp_(found, torch.sigmoid(sums - before).unsqueeze(-1).to(found.dtype))
            before.copy_(torch.logaddexp(before, sums))
        ctx.save_for_backward(query, key, value, out, total)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, total = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        keys, values = (_widen(given, query.shape[1]) for given in (key, value))
        into = [torch.empty_like(out) for _ in range(3)]
        given, scale = (grad, query, keys, values, out, total), ctx.scale
        for span in ctx.blocks.causal:
            parts = _flash_backward(*(_at(one, span) for one in given), scale=scale, causal=True)
            for one, part in zip(into, parts, strict=True):
                _at(one, span).copy_(part)
        for trees in ctx.blocks.padded:
            gathered = [_gather(one, trees) for one in given]
            # Padding has no weight in any gradient: exp(score - infinity) is zero.
            gathered[-1] = _mask_padding(gathered[-1], trees)
            parts = _flash_backward(*gathered, scale=scale, mask=trees.mask)
            for one, part in zip(into, parts, strict=True):
                _scatter(one, part, trees)
        for span, seen in ctx.blocks.paths:
            places = span, span, seen, seen, span, span
            parts = _flash_backward(*(_at(one, place) for one, place in zip(given, places, strict=True)), scale=scale)
            for one, place, part in zip(into, (span, seen, seen), parts, strict=True):
                _at(one, place).add_(part)
        return into[0], _narrow(into[1], key.shape[1]), _narrow(into[2], key.shape[1]), None, None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of a block, and for each query the log-sum-exp of its scores."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return found


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's queries, keys and values. `out` and `total` are merged over all blocks."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, total, 0.0, causal, attn_mask=mask, scale=scale
    )
    return found


def _at(given: Tensor, span: Span) -> Tensor:
    return given[:, :, span[0] : span[1]]


def _new_total(out: Tensor, sums: Tensor) -> Tensor:
    """Return an empty tensor for the log-sum-exp of all tokens, of shape (1, h, N)."""
    heads, tokens = out.shape[1], out.shape[2]
    return torch.empty((1, tokens, heads), dtype=sums.dtype).transpose(1, 2)


def _gather(given: Tensor, trees: PaddedTrees) -> Tensor:
    """Return the values of small trees' tokens: shape (1, h, N, ...) becomes (trees, h, tokens of a tree, ...)."""
    found = given.transpose(1, 2)[0].index_select(0, trees.places_N)
    return found.reshape(trees.count, -1, *found.shape[1:]).transpose(1, 2)


def _scatter(into: Tensor, found: Tensor, trees: PaddedTrees) -> None:
    """Copy the values of small trees' tokens back to the positions of these tokens; the reverse of `_gather`."""
    rows = found.transpose(1, 2).flatten(0, 1).index_select(0, trees.kept)
    into.transpose(1, 2)[0].index_copy_(0, trees.places_N[trees.kept], rows)


def _mask_padding(sums: Tensor, trees: PaddedTrees) -> Tensor:
    """Return the log-sum-exp of each token of small trees, with infinity for padding."""
    flat = sums.transpose(1, 2).flatten(0, 1)
    found = torch.full_like(flat, torch.inf)
    found[trees.kept] = flat[trees.kept]
    return found.reshape(trees.count, -1, *found.shape[1:]).transpose(1, 2)


def _widen(given: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values, so that they have as many heads as the queries."""
    times = heads // given.shape[1]
    return given if times == 1 else given.transpose(1, 2).repeat_interleave(times, dim=2).transpose(1, 2)


def _narrow(grad: Tensor, heads: int) -> Tensor:
    """Add up the gradients of repeated heads; the reverse of `_widen`."""
    return grad if grad.shape[1] == heads else grad.reshape(1, heads, -1, *grad.shape[2:]).sum(2)
