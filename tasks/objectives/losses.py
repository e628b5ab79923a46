"""Policy losses on recorded behaviour log-probs.

Notation: pi the policy being trained, pi_p the proximal policy (the learner before this version's first
update), mu the behaviour policy (log-probs recorded at sampling), A the advantage, sg stop-gradient.
All tensors are over M, the loss-masked tokens of a minibatch, flattened; losses are per token, to be
minimised, and not yet aggregated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and how many tokens the clip or the cap held back."""

    loss_M: Tensor
    clipped_M: Tensor


def grpo(
    logp_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped objective (Schulman et al. 2017, eq. 7) with r = pi/mu: -min(r A, clip(r, 1-e_lo, 1+e_hi) A).

    With `dual_clip` c, a negative advantage counts at most c times (Ye et al. 2020, eq. 5): max(., c A) for A < 0.
    Without it a stale token whose ratio has grown is pushed down without bound.
    """
    found = _clipped((logp_M - behaviour_M).exp(), advantage_M, clip_low, clip_high)
    if dual_clip is None:
        return found
    bound_M = -dual_clip * advantage_M
    over_M = (advantage_M < 0) & (found.loss_M > bound_M)
    return TokenLoss(torch.where(over_M, bound_M, found.loss_M), found.clipped_M | over_M)


def decoupled_ppo(
    logp_M: Tensor,
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> TokenLoss:
    """Decoupled PPO (Hilton et al. 2022, eq. 3): -sg(pi_p/mu) min(q A, clip(q) A) with q = pi/pi_p.

    The weight sg(pi_p/mu) is clamped at `weight_cap`; a clamped token stays in the denominator.
    """
    inner = _clipped((logp_M - proximal_M).exp(), advantage_M, clip_low, clip_high)
    weight_M = (proximal_M - behaviour_M).detach().exp()
    capped_M = weight_M.clamp(max=weight_cap)
    return TokenLoss(capped_M * inner.loss_M, inner.clipped_M | (weight_M > weight_cap))


def _clipped(ratio_M: Tensor, advantage_M: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    plain_M = ratio_M * advantage_M
    held_M = ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantage_M
    return TokenLoss(-torch.minimum(plain_M, held_M), held_M < plain_M)


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
