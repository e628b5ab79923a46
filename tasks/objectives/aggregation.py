"""How the losses of tokens become one number."""

from __future__ import annotations

import torch
from torch import Tensor


def row_weights(tokens_R: Tensor, aggregation: str) -> Tensor:
    """Weight of each token, by its row, that sums token losses into one number over a minibatch.

    `tokens_R` counts the masked tokens of the minibatch's R rows. `token-mean` gives every masked token the
    same weight; `sequence-mean` is the mean over rows of their token means (a row without tokens weighs
    nothing, but counts).
    """
    counts_R = tokens_R.to(torch.float32)
    if aggregation == "token-mean":
        return torch.full_like(counts_R, 1.0 / max(float(counts_R.sum()), 1.0))
    return 1.0 / (counts_R.clamp(min=1) * len(counts_R))
