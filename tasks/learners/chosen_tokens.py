"""Log-probs of chosen tokens and entropies from logits, in the logits' own memory.

    logits --> log-softmax, in their place --> log-probs of the targets, entropies
           <-- gradient, in its place      <-- gradients of both

So of M tokens one (M, V) tensor is there at a time, where autograd has four. The values and the gradients are those of
`log_softmax`, `gather` and -sum p log p, to the bit: the same operations, of some rows at a time.

Shapes: M tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE_BYTES = 2**22  # of the rows that are worked on at a time: they stay in the cache
ON_GPU = 32  # as many there, where each piece costs three launches


def chosen_tokens(
    logits_MV: Tensor, targets_M: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (M,) of `targets_M` in nats at `temperature`, and entropies with `entropy`. The logits are used up.

    Backward is run once, and leaves nothing of the log-softmax either.
    """
    made = logits_MV if logits_MV._base is None else logits_MV._base
    if hasattr(made.grad_fn, "_saved_result"):  # they are needed once more on the way back, as those of a tanh are
        logits_MV = logits_MV.clone()
    logp_M, entropy_M = _ChosenTokens.apply(logits_MV, targets_M, temperature, entropy)  # type: ignore[no-untyped-call]
    return logp_M, entropy_M


class _ChosenTokens(torch.autograd.Function):
    """See the module's docstring. What made the logits does not look at them again; if it did, autograd would refuse,
    since it sees that they have changed."""

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
    """Add the gradient of -sum p log p by log p: the terms that autograd has, and in its order."""
    p_PV, less_P1 = logp_PV.exp(), -given_P1
    found_PV += less_P1 * p_PV
    found_PV += less_P1 * logp_PV * p_PV


def _pieces(logp_MV: Tensor) -> Iterator[slice]:
    """Some rows at a time."""
    most = PIECE_BYTES * (ON_GPU if logp_MV.device.type == "cuda" else 1)
    count, rows = len(logp_MV), max(1, most // max(1, logp_MV[:1].nbytes))
    return (slice(begin, begin + rows) for begin in range(0, max(1, count), rows))
