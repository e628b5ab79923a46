"""Corrections for tokens that an older policy sampled: weights and masks from the ratio to it, without a gradient.

The ratio is of the surrogate's older policy to the behaviour policy where these are two (pi_p / mu, decoupled PPO),
else of the policy being trained (pi / mu). A masked token stays in the denominators. Shapes: M tokens, B of a whole
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.config import Correction
from rollflow.tasks.objectives.ratios import log_ratio


def weights(part: Correction, tokens: MaskedTokens, new_M: Tensor) -> tuple[Tensor, Tensor]:
    """What each token's loss is multiplied with, and whether its ratio was out of range, (M,) bool.

    `clamp`: min(max(r, low), high), decoupled PPO's cap. `mask`: r where low <= r <= high, else 0 (MIS, IcePop);
    without `weigh`, 1 there; with `judge`, the range is of the ratio at another level (geometric sequence masks).
    """
    ratio_M = log_ratio(new_M.detach(), tokens.behaviour_M, tokens.row_M, part.level).exp()
    if part.outside == "clamp":
        return ratio_M.clamp(part.low, part.high), (ratio_M < part.low) | (ratio_M > part.high)
    judged_M = ratio_M
    if part.judge is not None:
        judged_M = log_ratio(new_M.detach(), tokens.behaviour_M, tokens.row_M, part.judge).exp()
    out_M = (judged_M < part.low) | (judged_M > part.high)
    return torch.where(out_M, 0.0, ratio_M if part.weigh else torch.ones_like(ratio_M)), out_M


def within_second_moment(part: Correction, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
    """Keep all tokens but the fewest whose absence brings the mean of (log pi_p/mu)^2 to `second_moment` (M2PO).

    Zheng et al. 2025, Prosperity before collapse. Those with the largest squares go first; equal ones go together. All
    tokens count and may go, as in AReaL; in the paper, only those with A > 0 and r > 1, or A < 0 and r < 1. If even the
    smallest square is above `second_moment`, no token is kept (AReaL keeps that one).
    """
    square_B = (proximal_B - behaviour_B).double().square()
    ordered_B = square_B.sort().values
    means_B = ordered_B.cumsum(0) / torch.arange(1, len(ordered_B) + 1, device=ordered_B.device)
    count = int((means_B <= part.second_moment).sum())  # means of a sorted list only grow
    if count == len(ordered_B):
        return torch.ones_like(square_B, dtype=torch.bool)
    return square_B < ordered_B[count]
