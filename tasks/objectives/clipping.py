"""PPO's clip, which several objectives share."""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.base import TokenLoss


def clipped(ratio_M: Tensor, advantage_M: Tensor, low: float, high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017, eq. 7)."""
    plain_M = ratio_M * advantage_M
    held_M = ratio_M.clamp(1 - low, 1 + high) * advantage_M
    return TokenLoss(-torch.minimum(plain_M, held_M), held_M < plain_M)
