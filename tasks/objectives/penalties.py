"""A divergence, as a price of every token whatever its advantage; in the loss, or in the reward. Shapes: M tokens."""

from __future__ import annotations

from torch import Tensor

from rollflow.tasks.objectives.config import Penalties
from rollflow.tasks.objectives.ratios import BOUND

STEP = 0.2  # largest relative error that one version's weight follows


def kl_estimate(penalties: Penalties, new_M: Tensor, old_M: Tensor) -> Tensor:
    """Estimators of KL(new || old) from samples of new (Schulman 2020, Approximating KL divergence), d = log(new/old).

    k1 is d (its gradient is zero on average where new sampled), k2 is d^2 / 2, k3 is exp(-d) - 1 + d.
    """
    change_M = (new_M - old_M).clamp(-BOUND, BOUND)
    match penalties.kl:
        case "k1":
            return change_M
        case "k2":
            return change_M.square() / 2
        case "k3":
            return (-change_M).exp() - 1 + change_M


def adapted(penalties: Penalties, weight: float, divergence: float) -> float:
    """The next version's weight, after one of this divergence (nats a token), where there is a `kl_target`.

    weight (1 + gain e), e = divergence / target - 1 within [-0.2, 0.2] (Ziegler et al. 2019, section 2.2).
    """
    if penalties.kl_target is None:
        return weight
    error = min(max(divergence / penalties.kl_target - 1, -STEP), STEP)
    return weight * (1 + penalties.kl_gain * error)
