"""Computes the gradient of a model's last layer in pieces, and adds each piece in place.

Autograd would store two whole gradients, each of which can be larger than the logits of many tokens. The gradients of
this module equal autograd's bit for bit, because each element sums the same terms in the same order.

Shapes: M is the number of token positions, H the number of hidden features, and V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PIECE_BYTES = 2**22  # size of a piece of a gradient, in bytes, which fits into the CPU's cache
ON_GPU = 16  # factor of `PIECE_BYTES` on a GPU, where each piece costs three kernel launches


class AddingLinear(nn.Module):
    """Wraps `linear`, a linear layer without bias.

    Inside of `with add_in_place()`, a backward pass adds the gradient directly to the `grad` of the layer's weight. The
    input of the layer must have `requires_grad`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self._adds = linear, False

    @property
    def weight(self) -> Tensor:
        """The weight of `linear`, because some models read the data type of their last layer's weight."""
        return self.linear.weight

    @property
    def gains(self) -> bool:
        """True if the gradient is so large that adding it in place saves memory."""
        return self.linear.weight.nbytes > _piece_bytes(self.linear.weight)

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Let backward passes in a `with` block add gradients in place, without running the weight's autograd hooks."""
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
        ctx.weight_VH = linear.weight  # autograd does not track the weight, so its hooks do not run
        ctx.save_for_backward(given)
        return nn.functional.linear(given, linear.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (given,) = ctx.saved_tensors
        _add(ctx.weight_VH, slope.flatten(0, -2), given.flatten(0, -2))
        return slope @ ctx.weight_VH.detach(), None


def _add(weight_VH: nn.Parameter, slope_MV: Tensor, given_MH: Tensor) -> None:
    """Add the gradient of a weight to its `grad`, S rows at a time."""
    first = weight_VH.grad is None
    if first:
        weight_VH.grad = torch.empty_like(weight_VH)
    grad_VH = weight_VH.grad
    assert grad_VH is not None
    # Pieces have equal sizes, because a last piece of one row would use another kernel on some processors.
    pieces = max(1, grad_VH.nbytes // _piece_bytes(grad_VH))
    for some_VH, slope_MS in zip(grad_VH.tensor_split(pieces), slope_MV.tensor_split(pieces, dim=1), strict=True):
        made = slope_MS.t() @ given_MH
        some_VH.copy_(made if first else some_VH + made)


def _piece_bytes(tensor: Tensor) -> int:
    """Return the size of a piece of a gradient, in bytes, for the tensor's device."""
    return PIECE_BYTES * (ON_GPU if tensor.device.type == "cuda" else 1)
