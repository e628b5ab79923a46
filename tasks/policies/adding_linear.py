"""A model's last layer, whose weight's gradient is added to what is there some rows at a time.

Autograd makes the whole gradient of a call, and adds it then: beside the gradient, as much again, for each part of a
batch. Of a vocabulary of 151,936 that is more than the logits of many tokens. Here only `PIECE_BYTES` are made at a
time. The gradients are autograd's, to the bit: each of their elements is the same sum.

Shapes: M positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PIECE_BYTES = 2**22  # of a gradient's rows, which stay in the cache while they are added
ON_GPU = 16  # as many there, where each piece costs three launches


class AddingLinear(nn.Module):
    """`linear`, which has no bias. While it is `adding`, a backward pass through it changes its weight's `grad` itself;
    what it is given must need a gradient then."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self._adds = linear, False

    @property
    def weight(self) -> Tensor:
        """As `linear` has it: some models look at its type."""
        return self.linear.weight

    @property
    def gains(self) -> bool:
        """Whether the gradient is more than one piece."""
        return self.linear.weight.nbytes > _piece_bytes(self.linear.weight)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """For the length of a block, forward and backward. Nobody else then hears of the weight's gradient."""
        self._adds = self.linear.weight.requires_grad
        try:
            yield
        finally:
            self._adds = False

    def forward(self, given: Tensor) -> Tensor:
        """As `linear` does."""
        if not self._adds:
            return self.linear(given)  # type: ignore[no-any-return]
        return _Adding.apply(given, self.linear)  # type: ignore[no-any-return, no-untyped-call]


class _Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, linear: nn.Linear) -> Tensor:
        ctx.weight_VH = linear.weight  # autograd does not know that it is asked for: its hooks are silent
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
    # Alike: of one row alone some processors have another kernel.
    pieces = max(1, grad_VH.nbytes // _piece_bytes(grad_VH))
    for some_VH, slope_MS in zip(grad_VH.tensor_split(pieces), slope_MV.tensor_split(pieces, dim=1), strict=True):
        made = slope_MS.t() @ given_MH
        some_VH.copy_(made if first else some_VH + made)


def _piece_bytes(tensor: Tensor) -> int:
    """The bytes of a piece, on the tensor's device."""
    return PIECE_BYTES * (ON_GPU if tensor.device.type == "cuda" else 1)
