"""A model's input embedding that adds its weight's gradient in place, only in the rows that were read.

For each micro-batch, autograd builds a gradient of the whole vocabulary, which is zero except in the rows of the
micro-batch's tokens. Autograd then adds this gradient to `grad`, so it needs twice the memory of a gradient. The sums
of this module equal autograd's sums to the bit, unless the last layer has the same weight as the embedding. With a
shared weight, the order of the sums differs.

Shapes: T tokens, U different tokens among the T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_BYTES = 2**22  # size from which on an embedding is handled; a smaller embedding stays in the CPU's cache


class AddingEmbedding:
    """The input embedding of `model`, if it is a plain `nn.Embedding`; autograd handles any other embedding."""

    def __init__(self, model: Any) -> None:
        found: Any = None
        with suppress(NotImplementedError):  # transformers may not find the embedding
            found = model.get_input_embeddings()
        plain = type(found) is nn.Embedding and type(found.weight) is nn.Parameter
        asked = plain and not (found.sparse or found.scale_grad_by_freq or found.max_norm is not None)
        self._embedding: nn.Embedding | None = found if asked else None

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Make backward passes in the block add to the `grad` of the embedding's weight directly."""
        embedding = self._embedding
        if embedding is None or "forward" in vars(embedding):  # a library's hook has replaced `forward`
            yield
            return
        if not embedding.weight.requires_grad or embedding.weight.nbytes < LEAST_BYTES:
            yield
            return
        # If no input of a function needs a gradient, autograd does not call the function's backward pass.
        started = torch.zeros((), requires_grad=True, device=embedding.weight.device)
        embedding.forward = lambda input: _AccumulateRows.apply(started, input, embedding)  # type: ignore[method-assign, no-untyped-call]
        try:
            yield
        finally:
            del embedding.forward


class _AccumulateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, ids: Tensor, embedding: nn.Embedding) -> Tensor:
        ctx.weight_VH = embedding.weight  # autograd does not see the weight, so the weight's hooks do not run
        ctx.padding = embedding.padding_idx
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, embedding.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None]:
        ids_U, place_T = ctx.saved_tensors[0].flatten().unique(return_inverse=True)
        made_UH = torch.ops.aten.embedding_dense_backward(slope.flatten(0, -2), place_T, len(ids_U), -1, False)
        if ctx.padding is not None:  # the padding token has no gradient
            made_UH[ids_U == ctx.padding] = 0.0
        if ctx.weight_VH.grad is None:
            ctx.weight_VH.grad = torch.zeros_like(ctx.weight_VH)
        ctx.weight_VH.grad.index_add_(0, ids_U, made_UH)
        return None, None, None
