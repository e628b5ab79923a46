"""Decoupled PPO: the clip is around the proximal policy, the weight is towards the behaviour policy."""

from __future__ import annotations

from typing import ClassVar

from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.clipping import clipped
from rollflow.tasks.objectives.config import DecoupledPpoObjective


class DecoupledPpo(Objective):
    """-sg(pi_p/mu) min(q A, clip(q) A) with q = pi/pi_p (Hilton et al. 2022, eq. 3).

    The weight sg(pi_p/mu) is clamped at `weight_cap`; a clamped token stays in the denominator.
    """

    uses_proximal: ClassVar[bool] = True

    def __init__(self, config: DecoupledPpoObjective) -> None:
        self.config = config

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        assert tokens.proximal_M is not None
        ratio_M = (tokens.logp_M - tokens.proximal_M).exp()
        inner = clipped(ratio_M, tokens.advantage_M, self.config.clip_low, self.config.clip_high)
        weight_M = (tokens.proximal_M - tokens.behaviour_M).detach().exp()
        capped_M = weight_M.clamp(max=self.config.weight_cap)
        return TokenLoss(capped_M * inner.loss_M, inner.clipped_M | (weight_M > self.config.weight_cap))
