"""Surrogates: the loss of each token from its ratio r, its advantage A and its log-prob. Shapes: M tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import MaskedTokens, TokenLoss
from rollflow.tasks.objectives.config import BinaryTv, Clip, Kimi, PolicyGradient, Ratio, Surrogate
from rollflow.tasks.objectives.ratios import log_ratio


def surrogate_loss(part: Surrogate, ratio: Ratio, tokens: MaskedTokens, old_M: Tensor) -> TokenLoss:
    """Return a surrogate's loss; `old_M` are the log-probs of the ratio's older policy."""
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
    """Return PPO's clipped loss: -min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017, eq. 7).

    With `dual` = c, a negative advantage counts at most c times (Ye et al. 2020, eq. 5): max(., c A) for A < 0. Without
    `dual`, a stale token with a large ratio is pushed down without bound.
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
    """Return the policy-gradient loss -sg(clamp(r, range of A's sign)) A log pi (REINFORCE: Williams 1992).

    One range from 0 for both signs is TIS (Yao et al. 2025) and CISPO (MiniMax 2025). [1, 1] for good answers and
    [0, 1] for the others is TOPR (Le Roux et al. 2025). A range of a single number counts as no clip.
    """
    advantage_M = tokens.advantage_M
    good_M = advantage_M > 0
    ratio_M = log_ratio(tokens.logp_M.detach(), old_M, tokens.row_M, ratio.level).exp()
    weight_M = torch.where(good_M, ratio_M.clamp(*part.positive), ratio_M.clamp(*part.negative))
    weighs_M = torch.where(good_M, part.positive[0] != part.positive[1], part.negative[0] != part.negative[1])
    clipped_M = weighs_M & (weight_M != ratio_M) & (advantage_M != 0)
    return TokenLoss(-weight_M * advantage_M * tokens.logp_M, clipped_M)


def binary_tv_loss(part: BinaryTv, tokens: MaskedTokens, old_M: Tensor, ratio: Ratio) -> TokenLoss:
    """Return -r A until the probability has moved away by more than a bound; then zero.

    The bound is on the total variation of "this token or another": pi - mu, from above if A > 0, from below if A < 0.
    """
    advantage_M, moved_M = tokens.advantage_M, tokens.logp_M.detach().exp() - old_M.exp()
    over_M = ((advantage_M > 0) & (moved_M > part.high)) | ((advantage_M < 0) & (moved_M < -part.low))
    ratio_M = log_ratio(tokens.logp_M, old_M, tokens.row_M, ratio.level).exp()
    return TokenLoss(torch.where(over_M, 0.0, -ratio_M * advantage_M), over_M)


def kimi_loss(part: Kimi, tokens: MaskedTokens, old_M: Tensor, ratio: Ratio) -> TokenLoss:
    """Return -A log pi + tau/2 (log r)^2 (Kimi Team 2025).

    For the ratio of a whole response, each token gets the share of the square that belongs to its own log-ratio.
    """
    whole_M = log_ratio(tokens.logp_M, old_M, tokens.row_M, ratio.level)
    own_M = log_ratio(tokens.logp_M, old_M, tokens.row_M, "token")
    loss_M = -tokens.advantage_M * tokens.logp_M + part.tau / 2 * whole_M * own_M
    return TokenLoss(loss_M, torch.zeros_like(loss_M, dtype=torch.bool))
