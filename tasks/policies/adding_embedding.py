"""Adds the gradient of a model's input embedding in place, and only to the rows of tokens in the batch.

Autograd would store two gradients for the whole vocabulary in each micro-batch. The gradients of this module equal
autograd's bit for bit, unless the embedding shares its weight with the last layer.

Shapes: T is the number of tokens, U the number of distinct tokens, H the number of hidden features, and V the size of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_BYTES = 2**22  # smallest embedding, in bytes, for which this module is used


class AddingEmbedding:
    """Wraps the input embedding of `model`; only a plain `nn.Embedding` is changed."""

    def __init__(self, model: Any) -> None:
        found: Any = None
        with suppress(NotImplementedError):  # raised by transformers for models with an unknown input embedding
            found = model.get_input_embeddings()
        plain = type(found) is nn.Embedding and type(found.weight) is nn.Parameter
        asked = plain and not (found.sparse or found.scale_grad_by_freq or found.max_norm is not None)
        self._embedding: nn.Embedding | None = found if asked else None

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Let backward passes in a `with` block add gradients directly to the `grad` of the embedding's weight."""
        embedding = self._embedding
        if embedding is None or "forward" in vars(embedding):  # a library has replaced `forward`
            yield
            return
        if not embedding.weight.requires_grad or embedding.weight.nbytes < LEAST_BYTES:
            yield
            return
        # Autograd calls the backward pass of a function only if an input needs a gradient, such as `started`.
        started = torch.zeros((), requires_grad=True, device=embedding.weight.device)
        embedding.forward = lambda input: _AccumulateRows.apply(started, input, embedding)  # type: ignore[method-assign, no-untyped-call]
        try:
            yield
        finally:
            del embedding.forward


class _AccumulateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, ids: Tensor, embedding: nn.Embedding) -> Tensor:
        # Autograd does not track the weight, so hooks of the weight do not run.
        ctx.weight_VH = embedding.weight
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
