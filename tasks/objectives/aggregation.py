"""Aggregation of the tokens' losses into one number."""

from __future__ import annotations

import torch
from torch import Tensor


def row_weights(tokens_R: Tensor, aggregation: str, longest: int) -> Tensor:
    """Return (R,) float64, the weight of each row's tokens in the sum of losses over a minibatch.

    `tokens_R` counts the loss-masked tokens of the minibatch's R rows, including tokens whose loss a clip or a
    correction sets to zero. A row without loss-masked tokens does not count as a row.

    - `token-mean`: all tokens have the same weight (DAPO: Yu et al. 2025).
    - `sequence-mean`: the loss is the mean over rows of each row's mean token loss (GRPO: Shao et al. 2024).
    - `sequence-sum`: the loss is the mean over rows of each row's summed token loss (REINFORCE).
    - `constant`: as `sequence-sum`, divided by `longest`, the largest number of tokens that the policy may sample in a
      response (Dr.GRPO: Liu et al. 2025).
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
