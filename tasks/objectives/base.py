"""The interface of an objective, which computes a loss for each sampled token from log-probs and advantages.

In formulas, pi is the trained policy, and pi_p the proximal policy (the policy before the current version's first
update). The behaviour policy mu sampled the tokens; its log-probs were recorded at sampling. A is the advantage, and sg
the stop-gradient operator. All tensors are flat, with one element for each of the M tokens with loss mask 1 in a
micro-batch.

An objective returns one loss per token; the learner adds the losses up with weights (see `aggregation`). The losses of
a row (trajectory) do not depend on other rows of the batch. Equal inputs give bit-identical losses, so that any train
step can be replayed. A row with advantage zero is skipped, because it has no gradient, unless the objective sets
`every_row`.

An objective gets whole rows, unless it sets `by_token`. With `by_token`, a call may get only some tokens of a row, so
that fewer logits are in memory. The attribute `by_token` is not inherited, so a class that changes the loss must set it
again.

`tests/contracts/test_objectives.py` tests each sentence of this docstring for all objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The inputs of an objective's loss, one value per token, with log-probs in nats at the sampling temperature.

    Only `logp_M` and `entropy_M` have a gradient.
    """

    logp_M: Tensor  # log-probs under pi, the policy being trained
    behaviour_M: Tensor  # log-probs under mu, the behaviour policy
    advantage_M: Tensor  # advantage of each token; without a critic, all tokens of a row have the same advantage
    row_M: Tensor  # int64: number of the token's row (trajectory)
    proximal_M: Tensor | None = None  # log-probs under pi_p, the proximal policy, if the objective sets `uses_proximal`
    entropy_M: Tensor | None = None  # entropy of pi at the token in nats, if the objective sets `uses_entropy`
    kept_M: Tensor | None = None  # bool: True if the token has a loss (see `keep`), if the objective sets `uses_batch`
    reference_M: Tensor | None = None  # log-probs under the reference policy, if the objective sets `uses_reference`
    kl_weight: float | None = None  # weight of the KL penalty if the learner adapts the weight, else None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, and whether the probability ratio of the token was clipped or corrected."""

    loss_M: Tensor
    clipped_M: Tensor  # bool: True if the token's ratio was clipped
    corrected_M: Tensor | None = None  # bool: True if a correction capped the token's ratio or removed the token


class Objective(Protocol):
    """A training objective: the function that training minimizes."""

    uses_proximal: ClassVar[bool] = False  # True if `loss` needs `proximal_M`, which may cost a forward pass
    uses_entropy: ClassVar[bool] = False  # True if `loss` needs `entropy_M`
    uses_reference: ClassVar[bool] = False  # True if `loss` needs `reference_M`, which costs a forward pass
    uses_batch: ClassVar[bool] = False  # True if `loss` needs `kept_M`, which costs a forward pass
    every_row: ClassVar[bool] = False  # True if rows with advantage zero also have a gradient
    by_token: ClassVar[bool] = False  # True if a token's loss depends only on that token

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """Return the loss of each token."""

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        """Return for each token with loss mask 1 in the batch whether the token contributes to the loss. The learner
        calls `keep` before the first update of a policy version.
        """
        return torch.ones_like(proximal_B, dtype=torch.bool)
