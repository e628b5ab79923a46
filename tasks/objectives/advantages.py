"""Advantages from rewards. Shapes: R trajectories in a batch, each in one group; G groups."""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.config import Advantage

EPSILON = 1e-4  # keeps a group of all but equal rewards from dividing by next to nothing
TINY = 1e-8  # the same, of a batch: in the square
ROUNDING = 1e-12  # what is less is rounding, where nothing is meant


def advantages(part: Advantage, rewards_R: Tensor, groups_R: Tensor, tokens_R: Tensor, longest: int) -> Tensor:
    """(R,) the advantage of each trajectory, which all of its tokens have.

    `groups_R` numbers each trajectory's group from 0; `tokens_R` counts the tokens that the policy chose; `longest` is
    the most that it may. Where all that is compared is equal, the advantage is exactly zero.
    """
    shaped_R = shaped(part, rewards_R, tokens_R, longest)
    return signed(part, _scaled(part, shaped_R, _centred(part, shaped_R, groups_R, tokens_R), groups_R, tokens_R))


def shaped(part: Advantage, rewards_R: Tensor, tokens_R: Tensor, longest: int) -> Tensor:
    """(R,) rewards, less what long responses lose."""
    return rewards_R - overlong(tokens_R, longest, part.overlong).to(rewards_R.dtype)


def signed(part: Advantage, found: Tensor) -> Tensor:
    """Advantages, each times the weight of its sign."""
    return torch.where(found < 0, found * part.negative_weight, found * part.positive_weight)


def whitened(found: Tensor, weight: Tensor) -> Tensor:
    """Less the weighted mean, over the weighted deviation; exactly zero where all are equal."""
    if _equal(found, weight):
        return torch.zeros_like(found)
    mean, deviation = _moments(found, weight)
    return (found - mean) / deviation


def overlong(tokens_R: Tensor, longest: int, share: float) -> Tensor:
    """(R,) what a long response loses: 0 up to (1 - share) x longest tokens, then rising to 1 at `longest`.

    DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).
    """
    span = share * longest
    if span == 0:
        return torch.zeros(len(tokens_R), dtype=torch.float64)
    found_R = ((tokens_R.double() - (longest - span)) / span).clamp(0, 1)
    return torch.where(found_R < ROUNDING, 0.0, found_R)


def _centred(part: Advantage, rewards_R: Tensor, groups_R: Tensor, tokens_R: Tensor) -> Tensor:
    """Rewards less the baseline."""
    match part.baseline:
        case "none":
            return rewards_R
        case "batch":  # the mean over tokens, as REINFORCE++ whitens (Hu et al. 2025)
            weight_R = tokens_R.to(rewards_R.dtype)
            if _equal(rewards_R, weight_R):
                return torch.zeros_like(rewards_R)
            return rewards_R - (rewards_R * weight_R).sum() / weight_R.sum().clamp(min=1)
    centred_R = _in_group(rewards_R, groups_R)
    if part.baseline == "group":  # GRPO (Shao et al. 2024, section 4.1)
        return centred_R
    count_G = torch.bincount(groups_R).to(rewards_R.dtype)
    others_R = (count_G - 1).clamp(min=1)[groups_R]  # RLOO: less the mean of the others (Kool et al. 2019)
    return centred_R * count_G[groups_R] / others_R


def _in_group(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Rewards less the mean of their group."""
    count_G = torch.bincount(groups_R).to(rewards_R.dtype)
    mean_G = torch.zeros_like(count_G).index_add_(0, groups_R, rewards_R) / count_G
    return torch.where(_differ(rewards_R, groups_R), rewards_R - mean_G[groups_R], 0.0)


def _scaled(part: Advantage, rewards_R: Tensor, centred_R: Tensor, groups_R: Tensor, tokens_R: Tensor) -> Tensor:
    """Over the sample standard deviation (over n - 1), if any: that of the group is of its rewards."""
    match part.scale:
        case "none":
            return centred_R
        case "batch":
            return centred_R / _moments(centred_R, tokens_R.to(centred_R.dtype))[1]
        case "whiten":
            return whitened(centred_R, tokens_R.to(centred_R.dtype))
    count_G = torch.bincount(groups_R).to(centred_R.dtype)
    square_R = _in_group(rewards_R, groups_R) ** 2
    variance_G = torch.zeros_like(count_G).index_add_(0, groups_R, square_R) / (count_G - 1).clamp(min=1)
    return centred_R / (variance_G.sqrt()[groups_R] + EPSILON)


def _moments(found: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and deviation (over the weights' sum less 1)."""
    mean = (found * weight).sum() / weight.sum().clamp(min=1)
    square = ((found - mean).square() * weight).sum() / (weight.sum() - 1).clamp(min=1)
    return mean, (square + TINY).sqrt()


def _equal(found: Tensor, weight: Tensor) -> bool:
    """Whether all are equal that have a weight."""
    compared = found[weight > 0]
    return not len(compared) or bool((compared == compared[0]).all())


def _differ(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """(R,) bool: whether not all rewards of the group are equal, whatever their mean is rounded to."""
    groups = int(groups_R.max()) + 1 if len(groups_R) else 0
    empty_G = rewards_R.new_zeros(groups)
    least_G = empty_G.scatter_reduce(0, groups_R, rewards_R, "amin", include_self=False)
    most_G = empty_G.scatter_reduce(0, groups_R, rewards_R, "amax", include_self=False)
    return (least_G != most_G)[groups_R]
