"""Tests that log-probs and entropies computed in the memory of the logits are bit-identical to those of plain
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollflow.tasks.learners.forward import inplace_logprobs as module
from rollflow.tasks.learners.forward import token_logprobs
from rollflow.tasks.learners.forward.inplace_logprobs import chosen_tokens
from tests.contracts.test_token_logprobs import ARCHITECTURES, model_of, pass_over

M, V, H = 23, 517, 8
Found = tuple[Tensor, Tensor | None]
Way = Callable[..., Found]


def plain(logits_MV: Tensor, targets_M: Tensor, *, temperature: float = 1.0, entropy: bool = False) -> Found:
    """Compute log-probs and entropies with plain autograd."""
    if temperature != 1.0:
        logits_MV = logits_MV / temperature
    logp_MV = torch.log_softmax(logits_MV, -1)
    entropy_M = -(logp_MV.exp() * logp_MV).sum(-1) if entropy else None
    return logp_MV.gather(1, targets_M[:, None]).squeeze(1), entropy_M


def by_hand(logits_MV: Tensor, targets_M: Tensor, weight_M: Tensor, less_M: Tensor, temperature: float) -> Tensor:
    """Return the gradient of weight log p(target) + less entropy for the logits, of shape (M, V). By hand, the gradient
    is (weight (1[target] - p) - less p (log p + H)) / T, where H is the entropy and T the temperature.
    """
    logp_MV = torch.log_softmax(logits_MV / temperature, -1)
    p_MV = logp_MV.exp()
    entropy_M1 = -(p_MV * logp_MV).sum(-1, keepdim=True)
    hit_MV = torch.nn.functional.one_hot(targets_M, V)
    found = weight_M[:, None] * (hit_MV - p_MV) - less_M[:, None] * p_MV * (logp_MV + entropy_M1)
    return found / temperature


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return hidden states, the head's weights, targets, and the weights of log-probs and entropies in the loss."""
    torch.manual_seed(0)
    hidden_MH, weight_VH = torch.randn(M, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return [hidden_MH, weight_VH, torch.randint(V, (M,)), torch.randn(M, dtype=kind), torch.randn(M, dtype=kind)]


def gradients(way: Way, dtype: torch.dtype, parts: Sequence[str], temperature: float) -> list[Tensor]:
    """Return log-probs, entropies, and the gradients for hidden states and head of a loss with the named `parts`."""
    hidden_MH, weight_VH, targets_M, of_logp_M, of_entropy_M = drawn(dtype)
    leaves = [hidden_MH.requires_grad_(), weight_VH.requires_grad_()]
    logits_MV = hidden_MH @ weight_VH.T
    if dtype == torch.bfloat16:
        logits_MV = logits_MV.float()
    logp_M, entropy_M = way(logits_MV, targets_M, temperature=temperature, entropy=True)
    assert entropy_M is not None
    terms = {"logp": logp_M * of_logp_M, "entropy": entropy_M * of_entropy_M}
    torch.stack([terms[part] for part in parts]).sum().backward()  # type: ignore[no-untyped-call]
    return [logp_M.detach(), entropy_M.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_inplace_logprobs_and_gradients_equal_autograd(
    dtype: torch.dtype, temperature: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are equal for any number of rows that are processed at a time, and for each part of the
    loss.
    """
    monkeypatch.setattr(module, "PIECE_BYTES", rows * V * 4)
    for parts in (["logp"], ["entropy"], ["logp", "entropy"]):
        found, expected = (gradients(way, dtype, parts, temperature) for way in (chosen_tokens, plain))
        assert len(found) == len(expected) == 4
        assert all(map(torch.equal, found, expected)), parts


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_gradient_equals_the_formula_in_float64(temperature: float) -> None:
    hidden_MH, weight_VH, targets_M, of_logp_M, of_entropy_M = drawn(torch.float64)
    logits_MV = (hidden_MH @ weight_VH.T).requires_grad_()
    expected = by_hand(logits_MV.detach(), targets_M, of_logp_M, of_entropy_M, temperature)
    logp_M, entropy_M = chosen_tokens(1 * logits_MV, targets_M, temperature=temperature, entropy=True)
    assert entropy_M is not None
    (logp_M * of_logp_M + entropy_M * of_entropy_M).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logits_MV.grad, expected, atol=1e-10, rtol=1e-10)


class Storages(TorchDispatchMode):
    """Records the memory addresses of all tensors with M x V elements."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and tensor.numel() == M * V:
                self.seen.add(tensor.untyped_storage().data_ptr())
        return made


def test_logprobs_and_gradient_use_one_tensor_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass, with a temperature and entropies, use one tensor of logits."""
    monkeypatch.setattr(module, "PIECE_BYTES", 5 * V * 4)
    for way, one in ((chosen_tokens, True), (plain, False)):
        with Storages() as storages:
            gradients(way, torch.float32, ["logp", "entropy"], 0.7)
        assert (len(storages.seen) == 1) == one


def test_second_backward_pass_over_overwritten_logits_fails() -> None:
    """A second backward pass raises an error. If the logits are the output of tanh, which its backward pass needs, a
    copy of them is overwritten.
    """
    hidden_MH, weight_VH, targets_M, *_ = drawn()
    logits_MV = (hidden_MH @ weight_VH.T).requires_grad_()
    found = list[Tensor]()
    for way in (chosen_tokens, plain):
        logits_MV.grad = None
        logp_M, _ = way(torch.tanh(logits_MV)[None].squeeze(0), targets_M)
        logp_M.sum().backward(retain_graph=True)
        assert logits_MV.grad is not None
        found.append(logits_MV.grad.clone())
        if way is chosen_tokens:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                logp_M.sum().backward()
    assert torch.equal(*found)


def test_logprobs_of_an_empty_batch_have_gradient_zero() -> None:
    weight_VH = torch.randn(V, H, requires_grad=True)
    logp_M, entropy_M = chosen_tokens(torch.zeros(0, H) @ weight_VH.T, torch.zeros(0, dtype=torch.long), entropy=True)
    assert entropy_M is not None
    (logp_M.sum() + entropy_M.sum()).backward()
    assert torch.equal(weight_VH.grad, torch.zeros(V, H))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_inplace_gradients_equal_autograd_in_all_architectures(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients equal those of autograd with a soft-cap, a scale, a bias or tied embeddings, and with recomputed
    logits.
    """
    model = model_of(name)
    found = pass_over(model, chunk, monkeypatch)
    monkeypatch.setattr(token_logprobs, "chosen_tokens", plain)
    assert all(map(torch.equal, found, pass_over(model, chunk, monkeypatch)))
