"""An objective: REINFORCE, with a truncated importance weight relative to the policy that sampled the tokens."""

from __future__ import annotations

from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss


class TruncatedReinforce(Objective):
    """The loss of a token: -sg(min(pi/mu, cap)) A log pi."""

    by_token = True

    def __init__(self, cap: float = 2.0) -> None:
        self.cap = cap

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        weight_M = (tokens.logp_M - tokens.behaviour_M).detach().exp()
        loss_M = -weight_M.clamp(max=self.cap) * tokens.advantage_M * tokens.logp_M
        return TokenLoss(loss_M, weight_M > self.cap)
