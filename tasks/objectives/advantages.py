"""Advantages from rewards. Shapes: R trajectories in a batch, each in one group."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4  # keeps a group of equal rewards at advantage 0 instead of 0/0


def group_advantages(rewards_R: Tensor, groups_R: Tensor, *, normalize: bool) -> Tensor:
    """GRPO (Shao et al. 2024, section 4.1): reward minus the group's mean, over its standard deviation.

    Without `normalize` the deviation is left out, as in Dr.GRPO (Liu et al. 2025). `groups_R` numbers each
    trajectory's group from 0. The deviation is the sample one (over G - 1).
    """
    count_G = torch.bincount(groups_R).to(rewards_R.dtype)
    mean_G = torch.zeros_like(count_G).index_add_(0, groups_R, rewards_R) / count_G
    centred_R = rewards_R - mean_G[groups_R]
    if not normalize:
        return centred_R
    variance_G = torch.zeros_like(count_G).index_add_(0, groups_R, centred_R**2) / (count_G - 1).clamp(min=1)
    return centred_R / (variance_G.sqrt()[groups_R] + EPSILON)
