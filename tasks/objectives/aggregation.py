"""Combines the losses of all tokens of a minibatch into one number."""

from __future__ import annotations

import torch
from torch import Tensor


def row_weights(tokens_R: Tensor, aggregation: str, longest: int) -> Tensor:
    """Return the weight, as float64, that each row's tokens get in the sum of losses over a minibatch.

    `tokens_R` gives the number of tokens with loss mask 1 in each row of the minibatch. The number includes tokens
    whose loss is set to zero by a clip or a correction. A row without tokens with loss mask 1 does not count as a row.
    """
    counts_R = tokens_R.double()
    rows = max(int((tokens_R > 0).sum()), 1)
    match aggregation:
        case "token-mean":
            return torch.full_like(counts_R, 1.0 / max(float(counts_R.sum()), 1.0))
        case "sequence-mean":
            return 1.0 / (counts_R.clamp(min=1) * rows)
        case "sequence-sum":
            return torch.full_like(counts_R, 1.0 / rows)
        case "constant":
            return torch.full_like(counts_R, 1.0 / (rows * longest))
        case _:
            raise ValueError(aggregation)
