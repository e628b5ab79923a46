"""Corrections for tokens that an older policy sampled: weights and masks from a ratio, without a gradient.

The ratio is that of the surrogate's older policy to the behaviour policy, if these differ (pi_p / mu, decoupled PPO);
otherwise that of the trained policy (pi / mu). A masked token still counts in the denominators. Shapes: M tokens, B of
a whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.config import Correction
from rollflow.tasks.objectives.ratios import log_ratio


def correction_weights(part: Correction, tokens: MaskedTokens, new_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each token's loss, and (M,) bool: True if its ratio was out of range.

    `clamp`: min(max(r, low), high), decoupled PPO's cap. `mask`: r if low <= r <= high, else 0 (MIS, IcePop); without
    `weigh`, 1 instead of r. With `judge`, the range applies to the ratio at another level (geometric sequence masks).
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
    """Drop the fewest tokens that bring the mean of (log pi_p/mu)^2 down to `second_moment`; keep the rest (M2PO).

    Zheng et al. 2025, Prosperity before collapse. Tokens with the largest squares are dropped first; equal ones
    together. All tokens count and may be dropped, as in AReaL; in the paper, only those with A > 0 and r > 1, or A < 0
    and r < 1. If even the smallest square is above `second_moment`, no token is kept (AReaL keeps that one).
    """
    square_B = (proximal_B - behaviour_B).double().square()
    ordered_B = square_B.sort().values
    means_B = ordered_B.cumsum(0) / torch.arange(1, len(ordered_B) + 1, device=ordered_B.device)
    count = int((means_B <= part.second_moment).sum())  # means of a list in ascending order only grow
    if count == len(ordered_B):
        return torch.ones_like(square_B, dtype=torch.bool)
    return square_B < ordered_B[count]
