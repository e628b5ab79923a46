"""Computes KL penalties of tokens, which are added to the loss or subtracted from the reward. In shapes, M is the
number of tokens.
"""

from __future__ import annotations

from torch import Tensor

from rollflow.tasks.objectives.config import Penalties
from rollflow.tasks.objectives.ratios import BOUND

STEP = 0.2  # limit to which the relative error of the divergence is clipped when the KL weight is adapted


def kl_estimate(penalties: Penalties, new_M: Tensor, old_M: Tensor) -> Tensor:
    """Estimate the divergence KL(new || old) for each token, from samples of the new policy (Schulman 2020,
    Approximating KL divergence).

    With d = log(new/old), the estimator k1 is d, k2 is d^2 / 2, and k3 is exp(-d) - 1 + d. The gradient of k1 is zero
    on average over samples of the new policy.
    """
    change_M = (new_M - old_M).clamp(-BOUND, BOUND)
    match penalties.kl:
        case "k1":
            return change_M
        case "k2":
            return change_M.square() / 2
        case "k3":
            return (-change_M).exp() - 1 + change_M


def adapt_weight(penalties: Penalties, weight: float, divergence: float) -> float:
    """Return the weight of the KL penalty for the next policy version, given the divergence in nats per token.

    The new weight is weight (1 + gain e), where e = divergence / target - 1 is clipped to [-0.2, 0.2] (Ziegler et al.
    2019, section 2.2). Without `kl_target`, the weight stays the same.
    """
    if penalties.kl_target is None:
        return weight
    error = min(max(divergence / penalties.kl_target - 1, -STEP), STEP)
    return weight * (1 + penalties.kl_gain * error)
