"""Off-policy corrections: weights and masks for tokens that an older policy sampled, computed from a probability ratio
without gradient.

With `ratio.to = "proximal"`, the correction uses the ratio pi_p / mu of the proximal policy pi_p and the policy mu that
sampled the tokens (decoupled PPO). Otherwise, the correction uses the ratio pi / mu of the trained policy pi and mu. A
token whose loss is set to zero still counts in the denominators of mean losses. Shapes: M is the number of tokens in a
micro-batch, and B the number of tokens in a whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.config import Correction
from rollflow.tasks.objectives.ratios import log_ratio


def correction_weights(part: Correction, tokens: MaskedTokens, new_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each token's loss, and for each token whether its ratio r was out of range.

    With the correction `clamp`, the factor is min(max(r, low), high), as in decoupled PPO. With the correction `mask`,
    the factor is r if low <= r <= high, else 0, as in MIS and IcePop. With `weigh = false`, the factor of a token in
    the range is 1. With `judge`, the range applies to the ratio at the level `judge` (geometric sequence masks).
    """
    ratio_M = log_ratio(new_M.detach(), tokens.behaviour_M, tokens.row_M, part.level).exp()
    if part.outside == "clamp":
        return ratio_M.clamp(part.low, part.high), (ratio_M < part.low) | (ratio_M > part.high)
    judged_M = ratio_M
    if part.judge is not None:
        judged_M = log_ratio(new_M.detach(), tokens.behaviour_M, tokens.row_M, part.judge).exp()
    out_M = (judged_M < part.low) | (judged_M > part.high)
    return torch.where(out_M, 0.0, ratio_M if part.weigh else torch.ones_like(ratio_M)), out_M


def keep_second_moment(part: Correction, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
    """Drop the fewest tokens that bring the mean of (log pi_p/mu)^2 down to `second_moment`; return whether each token
    is kept.

    The method is M2PO (Zheng et al. 2025, Prosperity before collapse), applied to all tokens as in AReaL. Tokens with
    the largest squared log-ratios are dropped first. Tokens with equal squares are dropped together. If even the
    smallest squared log-ratio is above `second_moment`, no token is kept; AReaL would keep one token.
    """
    square_B = (proximal_B - behaviour_B).double().square()
    ordered_B = square_B.sort().values
    means_B = ordered_B.cumsum(0) / torch.arange(1, len(ordered_B) + 1, device=ordered_B.device)
    count = int((means_B <= part.second_moment).sum())  # means of ascending numbers never decrease
    if count == len(ordered_B):
        return torch.ones_like(square_B, dtype=torch.bool)
    return square_B < ordered_B[count]
