"""Builds an objective from its parts: surrogate(ratio) x correction + penalties."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.corrections import correction_weights, keep_second_moment
from rollflow.tasks.objectives.penalties import kl_estimate
from rollflow.tasks.objectives.surrogate_config import Kimi
from rollflow.tasks.objectives.surrogates import surrogate_loss


class ObjectiveOfParts(Objective):
    """An objective built from the parts of a `PartsObjective`."""

    def __init__(self, config: PartsObjective) -> None:
        self.config = config
        self.uses_proximal = config.ratio.to == "proximal"  # type: ignore[misc]
        self.uses_entropy = config.penalties.entropy_weight > 0  # type: ignore[misc]
        in_loss = config.penalties.kl_in == "loss"
        self.uses_reference = config.penalties.uses_reference and in_loss  # type: ignore[misc]
        self.uses_batch = config.correction.outside == "second-moment"  # type: ignore[misc]
        penalised = (config.penalties.kl_weight > 0 and in_loss) or self.uses_entropy
        self.every_row = penalised or isinstance(config.surrogate, Kimi)  # type: ignore[misc]
        levels = {config.ratio.level, config.correction.level, config.correction.judge or "token"}
        self.by_token = levels == {"token"}  # type: ignore[misc]

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        old_M = tokens.proximal_M if self.uses_proximal else tokens.behaviour_M
        assert old_M is not None
        found = surrogate_loss(self.config.surrogate, self.config.ratio, tokens, old_M)
        return self._penalize(self._correct(found, tokens, old_M), tokens)

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        """See `Objective`."""
        return keep_second_moment(self.config.correction, proximal_B, behaviour_B)

    def _correct(self, found: TokenLoss, tokens: MaskedTokens, old_M: Tensor) -> TokenLoss:
        part = self.config.correction
        if part.outside == "none":
            return found
        if part.outside == "second-moment":
            assert tokens.kept_M is not None
            return TokenLoss(torch.where(tokens.kept_M, found.loss_M, 0.0), found.clipped_M, ~tokens.kept_M)
        weight_M, out_M = correction_weights(part, tokens, old_M if self.uses_proximal else tokens.logp_M)
        return TokenLoss(weight_M * found.loss_M, found.clipped_M, out_M)

    def _penalize(self, found: TokenLoss, tokens: MaskedTokens) -> TokenLoss:
        penalties, loss_M = self.config.penalties, found.loss_M
        if penalties.kl_weight and penalties.kl_in == "loss":
            old_M = tokens.reference_M if self.uses_reference else tokens.behaviour_M
            assert old_M is not None
            weight = penalties.kl_weight if tokens.kl_weight is None else tokens.kl_weight
            loss_M = loss_M + weight * kl_estimate(penalties, tokens.logp_M, old_M)
        if penalties.entropy_weight:
            assert tokens.entropy_M is not None
            loss_M = loss_M - penalties.entropy_weight * tokens.entropy_M
        return replace(found, loss_M=loss_M)
