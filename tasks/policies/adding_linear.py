"""A model's last layer that adds its weight's gradient in place, some rows at a time.

For each call, autograd builds the whole gradient and then adds it: this takes as much memory again as the gradient, for
each part of a batch. At a vocabulary of 151,936 that is more than the logits of many tokens. Here only `PIECE_BYTES`
are built at a time. The gradients equal autograd's to the bit: each element is the same sum.

Shapes: M positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PIECE_BYTES = 2**22  # bytes of a gradient's rows, which stay in the CPU's cache while they are added
ON_GPU = 16  # factor for GPUs, where each piece costs three kernel launches


class AddingLinear(nn.Module):
    """Wrap `linear`, which has no bias. During `add_in_place`, a backward pass adds to its weight's `grad` directly.

    The input must need a gradient then.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self._adds = linear, False

    @property
    def weight(self) -> Tensor:
        """The weight of `linear`: some models look at its type."""
        return self.linear.weight

    @property
    def gains(self) -> bool:
        """True if the gradient is larger than one piece."""
        return self.linear.weight.nbytes > _piece_bytes(self.linear.weight)

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Add gradients in place during a block of forward and backward; autograd's hooks on the weight do not run."""
        self._adds = self.linear.weight.requires_grad
        try:
            yield
        finally:
            self._adds = False

    def forward(self, given: Tensor) -> Tensor:
        """Return the output of `linear`."""
        if not self._adds:
            return self.linear(given)  # type: ignore[no-any-return]
        return _AccumulateLinear.apply(given, self.linear)  # type: ignore[no-any-return, no-untyped-call]


class _AccumulateLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, linear: nn.Linear) -> Tensor:
        ctx.weight_VH = linear.weight  # hidden from autograd, whose hooks do not run
        ctx.save_for_backward(given)
        return nn.functional.linear(given, linear.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (given,) = ctx.saved_tensors
        _add(ctx.weight_VH, slope.flatten(0, -2), given.flatten(0, -2))
        return slope @ ctx.weight_VH.detach(), None


def _add(weight_VH: nn.Parameter, slope_MV: Tensor, given_MH: Tensor) -> None:
    """Add the weight's gradient to its `grad`; S: rows of a piece."""
    first = weight_VH.grad is None
    if first:
        weight_VH.grad = torch.empty_like(weight_VH)
    grad_VH = weight_VH.grad
    assert grad_VH is not None
    # Pieces of equal size: for a single row some processors use another kernel.
    pieces = max(1, grad_VH.nbytes // _piece_bytes(grad_VH))
    for some_VH, slope_MS in zip(grad_VH.tensor_split(pieces), slope_MV.tensor_split(pieces, dim=1), strict=True):
        made = slope_MS.t() @ given_MH
        some_VH.copy_(made if first else some_VH + made)


def _piece_bytes(tensor: Tensor) -> int:
    """Return the bytes of a piece on the tensor's device."""
    return PIECE_BYTES * (ON_GPU if tensor.device.type == "cuda" else 1)
