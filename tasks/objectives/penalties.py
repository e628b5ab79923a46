"""KL penalties: a price for each token, whatever its advantage; in the loss or in the reward. Shapes: M tokens."""

from __future__ import annotations

from torch import Tensor

from rollflow.tasks.objectives.config import Penalties
from rollflow.tasks.objectives.ratios import BOUND

STEP = 0.2  # largest relative error that counts when the weight is adapted


def kl_estimate(penalties: Penalties, new_M: Tensor, old_M: Tensor) -> Tensor:
    """Estimate KL(new || old) from samples of new (Schulman 2020, Approximating KL divergence); d = log(new/old).

    k1 is d (its gradient is zero on average over samples of new), k2 is d^2 / 2, k3 is exp(-d) - 1 + d.
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
    """Return the KL weight of the next version, given this version's divergence (nats a token).

    weight (1 + gain e), with e = divergence / target - 1 clipped to [-0.2, 0.2] (Ziegler et al. 2019, section 2.2).
    Without `kl_target` the weight stays.
    """
    if penalties.kl_target is None:
        return weight
    error = min(max(divergence / penalties.kl_target - 1, -STEP), STEP)
    return weight * (1 + penalties.kl_gain * error)
