"""The objective contract: a loss for each token that the policy sampled, from recorded behaviour log-probs.

Notation: pi the policy being trained, pi_p the proximal policy (the learner before this version's first update), mu the
behaviour policy (log-probs recorded at sampling), A the advantage, sg stop-gradient. All tensors are over M, the
loss-masked tokens of a micro-batch's rows, flattened, on the learner's device, in its precision.

- A loss is per token, to be minimized, and not yet aggregated: `aggregation` and `minibatches` give it a weight.
- Rows are independent of each other: their order and grouping change nothing. An objective gets whole rows, unless it
  is `by_token`: then it may get some tokens of a row at a time, so that fewer logits exist at once. `by_token` is not
  inherited: a class that changes the loss must set it again.
- The same tokens give the same loss, bit for bit, so that any step can be replayed.
- A row with advantage zero has no gradient and is skipped, unless the objective sets `every_row`.

`tests/contracts/test_objectives.py` tests each sentence once for all objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The inputs of a loss; all (M,). Log-probs are in nats at the sampling temperature.

    Only `logp_M` and `entropy_M` have a gradient.
    """

    logp_M: Tensor  # log-probs of pi
    behaviour_M: Tensor  # log-probs of mu
    advantage_M: Tensor  # one value for each row; with a critic, for each token
    row_M: Tensor  # int64: number of the token's row
    proximal_M: Tensor | None = None  # log-probs of pi_p, if the objective sets `uses_proximal`
    entropy_M: Tensor | None = None  # nats: entropy of pi at the token, if the objective sets `uses_entropy`
    kept_M: Tensor | None = None  # bool: the result of `keep`, if the objective sets `uses_batch`
    reference_M: Tensor | None = None  # log-probs of the reference policy, if the objective sets `uses_reference`
    kl_weight: float | None = None  # weight of the KL penalty if the learner adapts it; None: the objective's own


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and whether it was clipped or corrected; all (M,)."""

    loss_M: Tensor
    clipped_M: Tensor  # bool: True if its ratio was clipped
    corrected_M: Tensor | None = None  # bool: True if a correction capped or removed it: its ratio was out of range


class Objective(Protocol):
    """The function that training minimizes. See the module's docstring for the guarantees."""

    uses_proximal: ClassVar[bool] = False  # needs `proximal_M`, which costs a forward pass over the batch
    uses_entropy: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = False  # needs a frozen policy, which costs a forward pass over the batch
    uses_batch: ClassVar[bool] = False  # needs `keep`, which costs a forward pass over the batch
    every_row: ClassVar[bool] = False  # rows with advantage zero have a gradient, too
    by_token: ClassVar[bool] = False  # a token's loss depends only on that token

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """Return the loss of each token."""

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        """Return (B,) bool: True for each of a batch's masked tokens that counts; called before the first update."""
        return torch.ones_like(proximal_B, dtype=torch.bool)
