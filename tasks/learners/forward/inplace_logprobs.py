"""Computes log-probs of given tokens, and entropies, from logits; overwrites the logits to save memory.

    logits --> log-softmax, in place --> log-probs of the targets, entropies
           <-- gradient, in place    <-- gradients of both

Only one tensor of shape (M, V) is in memory, while autograd would store four. Values and gradients are bit-identical to
those that autograd computes for `log_softmax`, `gather` and -sum p log p.

In shapes, M is the number of tokens, and V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE_BYTES = 2**22  # bytes of logits that are processed at a time, so that they stay in the CPU's cache
ON_GPU = 32  # factor of `PIECE_BYTES` on a GPU, because each piece costs three kernel launches


def chosen_tokens(
    logits_MV: Tensor, targets_M: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs of `targets_M` in nats at `temperature`; with `entropy`, also return the entropies.

    The logits are overwritten. The backward pass can run only once, because it overwrites the stored log-softmax.
    """
    made = logits_MV if logits_MV._base is None else logits_MV._base
    # If the logits are the result of an operation such as tanh, its backward pass needs them, so a copy is overwritten.
    if hasattr(made.grad_fn, "_saved_result"):
        logits_MV = logits_MV.clone()
    logp_M, entropy_M = _ChosenTokens.apply(logits_MV, targets_M, temperature, entropy)  # type: ignore[no-untyped-call]
    return logp_M, entropy_M


class _ChosenTokens(torch.autograd.Function):
    """An autograd function that computes log-probs and entropies in the memory of the logits.

    If the operation that computed the logits needs them in its backward pass, autograd raises an error.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets_M: Tensor, temperature: float, entropy: bool) -> Any:
        own_MV = logits_MV.detach()
        if temperature != 1.0:
            own_MV.div_(temperature)
        logp_MV = torch.log_softmax(own_MV, -1, out=own_MV)
        ctx.temperature = temperature
        ctx.save_for_backward(logits_MV, targets_M)
        ctx.set_materialize_grads(False)
        logp_M = logp_MV.gather(1, targets_M[:, None]).squeeze(1)
        return logp_M, torch.cat([_entropy(logp_MV[some]) for some in _pieces(logp_MV)]) if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given_M: Tensor | None, given_entropy_M: Tensor | None) -> Any:
        logits_MV, targets_M = ctx.saved_tensors
        logp_MV = logits_MV.detach()
        for some in _pieces(logp_MV):
            logp_PV = logp_MV[some]
            found_PV = torch.zeros_like(logp_PV)
            if given_M is not None:
                found_PV.scatter_(1, targets_M[some, None], given_M[some, None])
            if given_entropy_M is not None:
                _add_of_entropy(found_PV, logp_PV, given_entropy_M[some, None])
            torch._log_softmax_backward_data(found_PV, logp_PV, -1, logp_PV.dtype, out=logp_PV)
        if ctx.temperature != 1.0:
            logp_MV.div_(ctx.temperature)
        return logp_MV, None, None, None


def _entropy(logp_PV: Tensor) -> Tensor:
    return -(logp_PV.exp() * logp_PV).sum(-1)


def _add_of_entropy(found_PV: Tensor, logp_PV: Tensor, given_P1: Tensor) -> None:
    """Add the gradient of the entropy with respect to log p to `found_PV`, with the same terms in the same order as
    autograd.
    """
    p_PV, less_P1 = logp_PV.exp(), -given_P1
    found_PV += less_P1 * p_PV
    found_PV += less_P1 * logp_PV * p_PV


def _pieces(logp_MV: Tensor) -> Iterator[slice]:
    """Return slices that together cover all rows of a matrix. A slice has at most `PIECE_BYTES` bytes (more on a GPU),
    but at least one row.
    """
    most = PIECE_BYTES * (ON_GPU if logp_MV.device.type == "cuda" else 1)
    count, rows = len(logp_MV), max(1, most // max(1, logp_MV[:1].nbytes))
    return (slice(begin, begin + rows) for begin in range(0, max(1, count), rows))
