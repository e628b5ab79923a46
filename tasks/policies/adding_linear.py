"""A model's last layer that adds its weight's gradient in place, some rows at a time.

For each call, autograd builds the whole gradient and then adds it to `grad`, so it needs twice the memory of a
gradient. At a vocabulary of 151,936 one gradient is larger than the logits of many tokens. This module builds only
`PIECE_BYTES` of a gradient at a time. The gradients equal autograd's gradients to the bit, because each element is the
sum of the same terms in the same order.

Shapes: M positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PIECE_BYTES = 2**22  # bytes of one piece of a gradient; a piece stays in the CPU's cache while the piece is added
ON_GPU = 16  # factor of `PIECE_BYTES` on a GPU, where each piece costs three kernel launches


class AddingLinear(nn.Module):
    """Wrap `linear`, a linear layer without bias.

    During `add_in_place`, a backward pass adds to the `grad` of the layer's weight directly, and the layer's input must
    need a gradient.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self._adds = linear, False

    @property
    def weight(self) -> Tensor:
        """The weight of `linear`, as some models read the type of their last layer's weight."""
        return self.linear.weight

    @property
    def gains(self) -> bool:
        """True if the weight's gradient is larger than one piece, so that adding it in place saves memory."""
        return self.linear.weight.nbytes > _piece_bytes(self.linear.weight)

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Make backward passes in the block add gradients in place; autograd's hooks on the weight do not run."""
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
        ctx.weight_VH = linear.weight  # autograd does not see the weight, so the weight's hooks do not run
        ctx.save_for_backward(given)
        return nn.functional.linear(given, linear.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (given,) = ctx.saved_tensors
        _add(ctx.weight_VH, slope.flatten(0, -2), given.flatten(0, -2))
        return slope @ ctx.weight_VH.detach(), None


def _add(weight_VH: nn.Parameter, slope_MV: Tensor, given_MH: Tensor) -> None:
    """Add the weight's gradient to the weight's `grad`, piece by piece. Shapes: S rows of a piece."""
    first = weight_VH.grad is None
    if first:
        weight_VH.grad = torch.empty_like(weight_VH)
    grad_VH = weight_VH.grad
    assert grad_VH is not None
    # Pieces have equal sizes. A last piece of a single row would run in another kernel on some processors.
    pieces = max(1, grad_VH.nbytes // _piece_bytes(grad_VH))
    for some_VH, slope_MS in zip(grad_VH.tensor_split(pieces), slope_MV.tensor_split(pieces, dim=1), strict=True):
        made = slope_MS.t() @ given_MH
        some_VH.copy_(made if first else some_VH + made)


def _piece_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of a piece on the tensor's device."""
    return PIECE_BYTES * (ON_GPU if tensor.device.type == "cuda" else 1)
