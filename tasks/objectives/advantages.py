"""Advantages from rewards. Shapes: R trajectories in a batch, each in one group; G groups."""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.config import Advantage

EPSILON = 1e-4  # added to a group's deviation, so that nearly equal rewards are not divided by almost zero
TINY = 1e-8  # the same for a batch: added to the squared deviation
ROUNDING = 1e-12  # a smaller value is a rounding error and counts as zero


def compute_advantages(part: Advantage, rewards_R: Tensor, groups_R: Tensor, tokens_R: Tensor, longest: int) -> Tensor:
    """Return (R,) the advantage of each trajectory, which applies to all of its tokens.

    `groups_R` numbers each trajectory's group from 0. `tokens_R` counts the tokens that the policy sampled; `longest`
    is the most that it may sample. If all compared rewards are equal, the advantage is exactly zero.
    """
    shaped_R = shape_rewards(part, rewards_R, tokens_R, longest)
    return weigh_signs(
        part, _scale(part, shaped_R, _subtract_baseline(part, shaped_R, groups_R, tokens_R), groups_R, tokens_R)
    )


def shape_rewards(part: Advantage, rewards_R: Tensor, tokens_R: Tensor, longest: int) -> Tensor:
    """Return (R,) rewards minus the penalty for overlong responses."""
    return rewards_R - penalize_overlong(tokens_R, longest, part.overlong).to(rewards_R.dtype)


def weigh_signs(part: Advantage, found: Tensor) -> Tensor:
    """Multiply each advantage by the weight of its sign."""
    return torch.where(found < 0, found * part.negative_weight, found * part.positive_weight)


def whiten(found: Tensor, weight: Tensor) -> Tensor:
    """Subtract the weighted mean and divide by the weighted deviation; exactly zero if all values are equal."""
    if _all_equal(found, weight):
        return torch.zeros_like(found)
    mean, deviation = _moments(found, weight)
    return (found - mean) / deviation


def penalize_overlong(tokens_R: Tensor, longest: int, share: float) -> Tensor:
    """Return (R,) the penalty of a long response: 0 up to (1 - share) x longest tokens, rising to 1 at `longest`.

    DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).
    """
    span = share * longest
    if span == 0:
        return torch.zeros(len(tokens_R), dtype=torch.float64)
    found_R = ((tokens_R.double() - (longest - span)) / span).clamp(0, 1)
    return torch.where(found_R < ROUNDING, 0.0, found_R)


def _subtract_baseline(part: Advantage, rewards_R: Tensor, groups_R: Tensor, tokens_R: Tensor) -> Tensor:
    """Subtract the baseline from rewards."""
    match part.baseline:
        case "none":
            return rewards_R
        case "batch":  # the mean over tokens, as REINFORCE++ whitens (Hu et al. 2025)
            weight_R = tokens_R.to(rewards_R.dtype)
            if _all_equal(rewards_R, weight_R):
                return torch.zeros_like(rewards_R)
            return rewards_R - (rewards_R * weight_R).sum() / weight_R.sum().clamp(min=1)
    centred_R = _subtract_group_mean(rewards_R, groups_R)
    if part.baseline == "group":  # GRPO (Shao et al. 2024, section 4.1)
        return centred_R
    count_G = torch.bincount(groups_R).to(rewards_R.dtype)
    others_R = (count_G - 1).clamp(min=1)[groups_R]  # RLOO: minus the mean of the others (Kool et al. 2019)
    return centred_R * count_G[groups_R] / others_R


def _subtract_group_mean(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Subtract the mean of its group from each reward."""
    count_G = torch.bincount(groups_R).to(rewards_R.dtype)
    mean_G = torch.zeros_like(count_G).index_add_(0, groups_R, rewards_R) / count_G
    return torch.where(_groups_differ(rewards_R, groups_R), rewards_R - mean_G[groups_R], 0.0)


def _scale(part: Advantage, rewards_R: Tensor, centred_R: Tensor, groups_R: Tensor, tokens_R: Tensor) -> Tensor:
    """Divide by the sample standard deviation (over n - 1), if any; a group's is that of its rewards."""
    match part.scale:
        case "none":
            return centred_R
        case "batch":
            return centred_R / _moments(centred_R, tokens_R.to(centred_R.dtype))[1]
        case "whiten":
            return whiten(centred_R, tokens_R.to(centred_R.dtype))
    count_G = torch.bincount(groups_R).to(centred_R.dtype)
    square_R = _subtract_group_mean(rewards_R, groups_R) ** 2
    variance_G = torch.zeros_like(count_G).index_add_(0, groups_R, square_R) / (count_G - 1).clamp(min=1)
    return centred_R / (variance_G.sqrt()[groups_R] + EPSILON)


def _moments(found: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted mean and deviation (divided by the sum of weights minus 1)."""
    mean = (found * weight).sum() / weight.sum().clamp(min=1)
    square = ((found - mean).square() * weight).sum() / (weight.sum() - 1).clamp(min=1)
    return mean, (square + TINY).sqrt()


def _all_equal(found: Tensor, weight: Tensor) -> bool:
    """Return True if all values that have a weight are equal."""
    compared = found[weight > 0]
    return not len(compared) or bool((compared == compared[0]).all())


def _groups_differ(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Return (R,) bool: True if the group's rewards are not all equal; rounding of their mean does not matter."""
    groups = int(groups_R.max()) + 1 if len(groups_R) else 0
    empty_G = rewards_R.new_zeros(groups)
    least_G = empty_G.scatter_reduce(0, groups_R, rewards_R, "amin", include_self=False)
    most_G = empty_G.scatter_reduce(0, groups_R, rewards_R, "amax", include_self=False)
    return (least_G != most_G)[groups_R]
