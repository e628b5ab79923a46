"""Combines the losses of all tokens of a minibatch into one number."""

from __future__ import annotations

import torch
from torch import Tensor


def row_weights(tokens_R: Tensor, aggregation: str, longest: int, episodes_R: Tensor | None = None) -> Tensor:
    """Return the weight (float64) that the tokens of each row have in the loss of a minibatch.

    `tokens_R` is the number of tokens with loss mask 1 in each row, including tokens whose loss a clip or a correction
    sets to zero. A row in which no token has loss mask 1 does not count as a row. `episodes_R` is the episode number of
    each row; all rows of an episode count as one row.
    """
    if episodes_R is not None:
        _, of_R = torch.unique(episodes_R, return_inverse=True)
        tokens_E = torch.zeros(int(of_R.max()) + 1 if len(of_R) else 0, dtype=tokens_R.dtype)
        return row_weights(tokens_E.index_add_(0, of_R, tokens_R), aggregation, longest)[of_R]
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
