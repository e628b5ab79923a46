"""What is added to the loss of every token, whatever its advantage. Shapes: M tokens."""

from __future__ import annotations

from torch import Tensor

from rollflow.tasks.objectives.config import Penalties
from rollflow.tasks.objectives.ratios import log_ratio


def kl_estimate(penalties: Penalties, new_M: Tensor, old_M: Tensor, row_M: Tensor) -> Tensor:
    """Estimators of KL(new || old) from samples of new (Schulman 2020, Approximating KL divergence), d = log(new/old).

    k1 is d (its gradient is zero on average where new sampled), k2 is d^2 / 2, k3 is exp(-d) - 1 + d.
    """
    change_M = log_ratio(new_M, old_M, row_M, "token")
    match penalties.kl:
        case "k1":
            return change_M
        case "k2":
            return change_M.square() / 2
        case "k3":
            return (-change_M).exp() - 1 + change_M
