"""Computes advantages from rewards. Shapes: R is the number of trajectories in a batch, and G the number of groups of
responses."""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.advantage_config import Advantage

EPSILON = 1e-4  # added to the standard deviation of a group's rewards, to avoid dividing by almost zero
TINY = 1e-8  # added to the variance of a batch's advantages, to avoid dividing by almost zero
ROUNDING = 1e-12  # a length penalty below this value is a rounding error and counts as zero


def compute_advantages(
    part: Advantage,
    rewards_R: Tensor,
    groups_R: Tensor,
    tokens_R: Tensor,
    longest: int,
    branches_R: Tensor | None = None,
) -> Tensor:
    """Return one advantage for each trajectory; all tokens of a trajectory get it.

    `groups_R` is the number of each trajectory's group of responses, from 0. `tokens_R` is the number of sampled tokens
    of each trajectory. `longest` is the largest number of tokens that the policy may sample in one response.
    `branches_R` is True for each trajectory that was split off from another trajectory of its episode. A branch gets an
    advantage, but does not count in the mean and the standard deviation of its group, so that an episode counts once.
    If all compared rewards are equal, the advantages are exactly zero.
    """
    shaped_R = shape_rewards(part, rewards_R, tokens_R, longest)
    episodes_R = torch.ones_like(groups_R, dtype=torch.bool) if branches_R is None else ~branches_R
    centred_R = subtract_baseline(part, shaped_R, groups_R, tokens_R, episodes_R)
    return weigh_signs(part, scale_advantages(part, shaped_R, centred_R, groups_R, tokens_R, episodes_R))


def shape_rewards(part: Advantage, rewards_R: Tensor, tokens_R: Tensor, longest: int) -> Tensor:
    """Return each trajectory's reward minus its penalty for an overlong response."""
    return rewards_R - penalize_overlong(tokens_R, longest, part.overlong).to(rewards_R.dtype)


def weigh_signs(part: Advantage, found: Tensor) -> Tensor:
    """Multiply positive advantages by `positive_weight`, and negative advantages by `negative_weight`."""
    return torch.where(found < 0, found * part.negative_weight, found * part.positive_weight)


def whiten(found: Tensor, weight: Tensor) -> Tensor:
    """Whiten values: subtract their weighted mean, and divide by their weighted standard deviation; return zeros if all
    values are equal.
    """
    if _all_equal(found, weight):
        return torch.zeros_like(found)
    mean, deviation = _moments(found, weight)
    return (found - mean) / deviation


def penalize_overlong(tokens_R: Tensor, longest: int, share: float) -> Tensor:
    """Return the length penalty of each response. The penalty is 0 for at most (1 - share) x longest tokens, and rises
    linearly to 1 at `longest` tokens.

    The penalty is DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).
    """
    span = share * longest
    if span == 0:
        return torch.zeros(len(tokens_R), dtype=torch.float64)
    found_R = ((tokens_R.double() - (longest - span)) / span).clamp(0, 1)
    return torch.where(found_R < ROUNDING, 0.0, found_R)


def subtract_baseline(
    part: Advantage, rewards_R: Tensor, groups_R: Tensor, tokens_R: Tensor, episodes_R: Tensor
) -> Tensor:
    """Subtract the baseline `part.baseline` from each reward."""
    match part.baseline:
        case "none":
            return rewards_R
        case "batch":  # subtract the mean over all tokens, as in REINFORCE++ (Hu et al. 2025)
            weight_R = tokens_R.to(rewards_R.dtype)
            if _all_equal(rewards_R, weight_R):
                return torch.zeros_like(rewards_R)
            return rewards_R - (rewards_R * weight_R).sum() / weight_R.sum().clamp(min=1)
    centred_R = _subtract_group_mean(rewards_R, groups_R, episodes_R)
    if part.baseline == "group":  # subtract the group's mean, as in GRPO (Shao et al. 2024, section 4.1)
        return centred_R
    count_G = torch.bincount(groups_R[episodes_R]).to(rewards_R.dtype)
    # RLOO: the mean of the other rewards of the group is subtracted (Kool et al. 2019).
    others_R = (count_G - 1).clamp(min=1)[groups_R]
    return centred_R * count_G[groups_R] / others_R


def _subtract_group_mean(rewards_R: Tensor, groups_R: Tensor, episodes_R: Tensor) -> Tensor:
    """Subtract from each reward the mean reward of its group. Branches do not count in the mean."""
    count_G = torch.bincount(groups_R[episodes_R]).to(rewards_R.dtype)
    mean_G = torch.zeros_like(count_G).index_add_(0, groups_R[episodes_R], rewards_R[episodes_R]) / count_G
    return torch.where(groups_differ(rewards_R, groups_R), rewards_R - mean_G[groups_R], 0.0)


def scale_advantages(
    part: Advantage, rewards_R: Tensor, centred_R: Tensor, groups_R: Tensor, tokens_R: Tensor, episodes_R: Tensor
) -> Tensor:
    """Divide advantages by the sample standard deviation that `part.scale` names.

    With the scale "group", the divisor is the standard deviation of the rewards of the group. With the scale "batch",
    the divisor is the standard deviation of the advantages of the batch.
    """
    match part.scale:
        case "none":
            return centred_R
        case "batch":
            return centred_R / _moments(centred_R, tokens_R.to(centred_R.dtype))[1]
        case "whiten":
            return whiten(centred_R, tokens_R.to(centred_R.dtype))
    count_G = torch.bincount(groups_R[episodes_R]).to(centred_R.dtype)
    square_R = _subtract_group_mean(rewards_R, groups_R, episodes_R)[episodes_R] ** 2
    variance_G = torch.zeros_like(count_G).index_add_(0, groups_R[episodes_R], square_R) / (count_G - 1).clamp(min=1)
    return centred_R / (variance_G.sqrt()[groups_R] + EPSILON)


def _moments(found: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and the weighted sample standard deviation of `found`."""
    mean = (found * weight).sum() / weight.sum().clamp(min=1)
    square = ((found - mean).square() * weight).sum() / (weight.sum() - 1).clamp(min=1)
    return mean, (square + TINY).sqrt()


def _all_equal(found: Tensor, weight: Tensor) -> bool:
    """Return True if all values with a weight above zero are equal."""
    compared = found[weight > 0]
    return not len(compared) or bool((compared == compared[0]).all())


def groups_differ(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Return for each trajectory whether the rewards of its group are not all equal.

    Rewards are not compared with their mean, because the mean may be rounded.
    """
    groups = int(groups_R.max()) + 1 if len(groups_R) else 0
    empty_G = rewards_R.new_zeros(groups)
    least_G = empty_G.scatter_reduce(0, groups_R, rewards_R, "amin", include_self=False)
    most_G = empty_G.scatter_reduce(0, groups_R, rewards_R, "amax", include_self=False)
    return (least_G != most_G)[groups_R]
