"""What every objective guarantees: a loss for each token that the policy chose, from recorded behaviour log-probs.

Notation: pi the policy being trained, pi_p the proximal policy (the learner before this version's first update), mu the
behaviour policy (log-probs recorded at sampling), A the advantage, sg stop-gradient. All tensors are over M, the
loss-masked tokens of a micro-batch's rows, flattened, on the learner's device, in its precision.

- A loss is per token, to be minimised, and not yet aggregated: `aggregation` and `minibatches` weigh it.
- Rows do not see each other, but an objective is given whole rows: their order and grouping changes nothing. One that
  is `by_token` may be given some tokens of a row at a time, so that fewer logits are there at once. It is not
  inherited: a class that changes the loss says it again.
- The same tokens give the same loss, bit for bit, so that any step can be replayed.
- A row of advantage zero has no gradient, and is not run; an objective with `every_row` is given those rows, too.

Each is tested once for all objectives in `tests/contracts/test_objectives.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """What a loss is made of; all (M,). Log-probs in nats at the sampling temperature.

    Only `logp_M` and `entropy_M` have a gradient.
    """

    logp_M: Tensor  # of pi
    behaviour_M: Tensor  # of mu
    advantage_M: Tensor  # of the token's row; with a critic, of the token
    row_M: Tensor  # int64: which tokens are of one row
    proximal_M: Tensor | None = None  # of pi_p, where the objective has `uses_proximal`
    entropy_M: Tensor | None = None  # nats, of pi where it chose the token, where the objective has `uses_entropy`
    kept_M: Tensor | None = None  # bool, what `keep` gave, where the objective has `uses_batch`
    reference_M: Tensor | None = None  # log-probs of the reference policy, where the objective has `uses_reference`
    kl_weight: float | None = None  # of a divergence, where the learner adapts it; else the objective's own


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and what held it back; all (M,)."""

    loss_M: Tensor
    clipped_M: Tensor  # bool: a clip of its ratio
    corrected_M: Tensor | None = None  # bool: a correction found its ratio out of range, and capped it or left it out


class Objective(Protocol):
    """What is minimised. See the module's docstring for the guarantees."""

    uses_proximal: ClassVar[bool] = False  # pi_p costs a forward pass over the batch
    uses_entropy: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = False  # a frozen policy, which costs a forward pass over the batch
    uses_batch: ClassVar[bool] = False  # `keep` is asked, which costs that pass
    every_row: ClassVar[bool] = False  # it has a gradient where the advantage is zero, too
    by_token: ClassVar[bool] = False  # a token's loss is made of what is given of that token alone

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """The loss of each token."""

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        """Which of all B masked tokens of a version's batch count, (B,) bool; asked once, before the first update."""
        return torch.ones_like(proximal_B, dtype=torch.bool)
