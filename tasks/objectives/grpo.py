"""GRPO's loss: PPO's clip of pi/mu."""

from __future__ import annotations

import torch

from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.clipping import clipped
from rollflow.tasks.objectives.config import GrpoObjective


class Grpo(Objective):
    """-min(r A, clip(r, 1-e_lo, 1+e_hi) A) with r = pi/mu (Schulman et al. 2017, eq. 7).

    With `dual_clip` c, a negative advantage counts at most c times (Ye et al. 2020, eq. 5): max(., c A) for A < 0.
    Without it a stale token whose ratio has grown is pushed down without bound.
    """

    def __init__(self, config: GrpoObjective) -> None:
        self.config = config

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        low, high, dual = self.config.clip_low, self.config.clip_high, self.config.dual_clip
        found = clipped((tokens.logp_M - tokens.behaviour_M).exp(), tokens.advantage_M, low, high)
        if dual is None:
            return found
        bound_M = -dual * tokens.advantage_M
        over_M = (tokens.advantage_M < 0) & (found.loss_M > bound_M)
        return TokenLoss(torch.where(over_M, bound_M, found.loss_M), found.clipped_M | over_M)
