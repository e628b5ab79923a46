"""Tests that the last layer's in-place gradient equals autograd's bit for bit, without a second gradient in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollflow.tasks.policies import adding_linear
from rollflow.tasks.policies.adding_linear import AddingLinear

ROWS, POSITIONS, HIDDEN = 50, 23, 8


def gradients(*, adds: bool, parts: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the weight and of the input, for several parts one after the other."""
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, ROWS, bias=False).to(dtype)
    given = torch.randn(parts, 1, POSITIONS, HIDDEN).to(dtype).requires_grad_()
    slopes = torch.randn(parts, 1, POSITIONS, ROWS).to(dtype)
    made = AddingLinear(linear)
    for part, slope in zip(given, slopes, strict=True):
        if adds:
            with made.add_in_place():
                made(part).backward(slope)
        else:
            made(part).backward(slope)
    assert linear.weight.grad is not None
    assert given.grad is not None
    return linear.weight.grad, given.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 16, ROWS, 1000])
@pytest.mark.parametrize("parts", [1, 3])
def test_linear_layer_gradients_equal_autograd(
    rows: int, parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adding_linear, "PIECE_BYTES", rows * HIDDEN * dtype.itemsize)
    own, theirs = gradients(adds=True, parts=parts, dtype=dtype), gradients(adds=False, parts=parts, dtype=dtype)
    for mine, other in zip(own, theirs, strict=True):
        # for a single row torch uses another kernel
        torch.testing.assert_close(mine, other, rtol=0, atol=0 if rows > 1 else 1e-5)


def test_frozen_linear_weight_gets_no_gradient() -> None:
    linear = nn.Linear(HIDDEN, ROWS, bias=False).requires_grad_(False)
    given = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    made = AddingLinear(linear)
    with made.add_in_place():
        made(given).sum().backward()
    assert linear.weight.grad is None
    assert given.grad is not None


def test_autograd_of_linear_layers_is_restored_after_the_block() -> None:
    """Autograd's hooks run after the block, and not within it."""
    linear = nn.Linear(HIDDEN, ROWS, bias=False)
    given = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    heard: list[int] = []
    linear.weight.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    made = AddingLinear(linear)
    with made.add_in_place():
        made(given).sum().backward()
    assert not heard
    made(given).sum().backward()
    assert heard == [1]
