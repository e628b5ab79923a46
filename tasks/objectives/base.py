"""The objective interface: computes a loss for each token that the policy sampled, given the log-probs recorded at
sampling.

In formulas, pi is the policy being trained, and pi_p is the proximal policy, which is the learner's policy before the
current policy version's first update. The behaviour policy mu sampled the tokens, and its log-probs were recorded at
sampling. A is the advantage, and sg the stop-gradient operator. All tensors of an objective are flat, with one element
for each of the M tokens with loss mask 1 in a micro-batch. All tensors are on the learner's device and in the learner's
precision.

An objective returns a loss for each token, which training minimizes. An objective does not aggregate token losses. The
learner later gives each token's loss a weight (see `aggregation`). The losses of a row (trajectory) do not depend on
the other rows of the batch, nor on the order of rows. The same tokens give bit-identical losses, so that any train step
can be replayed. A row whose advantage is zero contributes nothing to the gradient and is skipped, unless the objective
sets `every_row`.

An objective gets whole rows, unless its attribute `by_token` is set. An objective with `by_token` set may get only some
tokens of a row in one call, so that fewer logits are in memory. The attribute `by_token` is not inherited, so a class
that changes the loss must set `by_token` again.

`tests/contracts/test_objectives.py` tests each sentence of this docstring for all objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The inputs of an objective's loss, with one value for each of M tokens. Log-probs are in nats at the sampling
    temperature.

    Only the tensors `logp_M` and `entropy_M` have a gradient.
    """

    logp_M: Tensor  # log-probs under pi, the policy being trained
    behaviour_M: Tensor  # log-probs under mu, the behaviour policy
    advantage_M: Tensor  # advantage of each token; without a critic, all tokens of a row have the same advantage
    row_M: Tensor  # int64: number of the token's row (trajectory)
    proximal_M: Tensor | None = None  # log-probs under pi_p, the proximal policy, if the objective sets `uses_proximal`
    entropy_M: Tensor | None = None  # entropy of pi at the token in nats, if the objective sets `uses_entropy`
    kept_M: Tensor | None = None  # bool: True if the token counts (see `keep`), if the objective sets `uses_batch`
    reference_M: Tensor | None = None  # log-probs under the reference policy, if the objective sets `uses_reference`
    kl_weight: float | None = None  # weight of the KL penalty if the learner adapts the weight, else None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, and whether the probability ratio of the token was clipped or corrected."""

    loss_M: Tensor
    clipped_M: Tensor  # bool: True if the token's ratio was clipped
    corrected_M: Tensor | None = None  # bool: True if a correction capped the token's ratio or removed the token


class Objective(Protocol):
    """A training objective: the function that training minimizes. The module's docstring lists the guarantees of an
    objective."""

    uses_proximal: ClassVar[bool] = False  # True if `loss` needs `proximal_M`, which may cost a forward pass
    uses_entropy: ClassVar[bool] = False  # True if `loss` needs `entropy_M`
    uses_reference: ClassVar[bool] = False  # True if `loss` needs `reference_M`, which costs a forward pass
    uses_batch: ClassVar[bool] = False  # True if `loss` needs `kept_M`, which costs a forward pass
    every_row: ClassVar[bool] = False  # True if rows with advantage zero also have a gradient
    by_token: ClassVar[bool] = False  # True if a token's loss depends only on that token

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """Return the loss of each token."""

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        """Return for each token with loss mask 1 in the batch whether the token's loss counts. The learner calls the
        method `keep` before a policy version's first update."""
        return torch.ones_like(proximal_B, dtype=torch.bool)
