"""Computes surrogate losses: the loss of each token, from its probability ratio r, its advantage A and its log-prob.
In shapes, M is the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import MaskedTokens, TokenLoss
from rollflow.tasks.objectives.ratios import log_ratio
from rollflow.tasks.objectives.surrogate_config import BinaryTv, Clip, Kimi, PolicyGradient, Ratio, Surrogate


def surrogate_loss(part: Surrogate, ratio: Ratio, tokens: MaskedTokens, old_M: Tensor) -> TokenLoss:
    """Return the surrogate loss of each token. `old_M` are the log-probs under the older policy."""
    match part:
        case Clip():
            return clip_loss(part, log_ratio(tokens.logp_M, old_M, tokens.row_M, ratio.level).exp(), tokens.advantage_M)
        case PolicyGradient():
            return policy_gradient_loss(part, ratio, tokens, old_M)
        case BinaryTv():
            return binary_tv_loss(part, tokens, old_M, ratio)
        case Kimi():
            return kimi_loss(part, tokens, old_M, ratio)


def clip_loss(part: Clip, ratio_M: Tensor, advantage_M: Tensor) -> TokenLoss:
    """Return PPO's clipped loss, -min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017, eq. 7).

    In the formula, r is the ratio and A the advantage of a token. If `dual` is a number c, the loss of a token with a
    negative advantage is at most c |A| (Ye et al. 2020, eq. 5).
    """
    plain_M = ratio_M * advantage_M
    held_M = ratio_M.clamp(1 - part.low, 1 + part.high) * advantage_M
    loss_M, clipped_M = -torch.minimum(plain_M, held_M), held_M < plain_M
    if part.dual is None:
        return TokenLoss(loss_M, clipped_M)
    bound_M = -part.dual * advantage_M
    over_M = (advantage_M < 0) & (loss_M > bound_M)
    return TokenLoss(torch.where(over_M, bound_M, loss_M), clipped_M | over_M)


def policy_gradient_loss(part: PolicyGradient, ratio: Ratio, tokens: MaskedTokens, old_M: Tensor) -> TokenLoss:
    """Return REINFORCE's loss -w A log pi (Williams 1992), where w is the clamped ratio without gradient.

    If positive and negative advantages have the same range, which begins at 0, the loss is that of TIS (Yao et al.
    2025) and CISPO (MiniMax 2025). With w = 1 for A > 0 and the range [0, 1] for other A, the loss is that of TOPR (Le
    Roux et al. 2025). Where the range is a single number, no token counts as clipped.
    """
    advantage_M = tokens.advantage_M
    good_M = advantage_M > 0
    ratio_M = log_ratio(tokens.logp_M.detach(), old_M, tokens.row_M, ratio.level).exp()
    weight_M = torch.where(good_M, ratio_M.clamp(*part.positive), ratio_M.clamp(*part.negative))
    weighs_M = torch.where(good_M, part.positive[0] != part.positive[1], part.negative[0] != part.negative[1])
    clipped_M = weighs_M & (weight_M != ratio_M) & (advantage_M != 0)
    return TokenLoss(-weight_M * advantage_M * tokens.logp_M, clipped_M)


def binary_tv_loss(part: BinaryTv, tokens: MaskedTokens, old_M: Tensor, ratio: Ratio) -> TokenLoss:
    """Return the loss -r A, or zero for a token whose probability differs too much from that under the older policy.

    Let pi be the token's probability under the trained policy, and mu under the older policy. The difference is too
    large if pi - mu > high for A > 0, or pi - mu < -low for A < 0.
    """
    advantage_M, moved_M = tokens.advantage_M, tokens.logp_M.detach().exp() - old_M.exp()
    over_M = ((advantage_M > 0) & (moved_M > part.high)) | ((advantage_M < 0) & (moved_M < -part.low))
    ratio_M = log_ratio(tokens.logp_M, old_M, tokens.row_M, ratio.level).exp()
    return TokenLoss(torch.where(over_M, 0.0, -ratio_M * advantage_M), over_M)


def kimi_loss(part: Kimi, tokens: MaskedTokens, old_M: Tensor, ratio: Ratio) -> TokenLoss:
    """Return Kimi's loss -A log pi + tau/2 (log r)^2 (Kimi Team 2025).

    If r is the ratio of a whole response, each token gets log r times its own log-ratio.
    """
    whole_M = log_ratio(tokens.logp_M, old_M, tokens.row_M, ratio.level)
    own_M = log_ratio(tokens.logp_M, old_M, tokens.row_M, "token")
    loss_M = -tokens.advantage_M * tokens.logp_M + part.tau / 2 * whole_M * own_M
    return TokenLoss(loss_M, torch.zeros_like(loss_M, dtype=torch.bool))
