"""Advantages of tokens from rewards of tokens or steps, without a critic (for a critic, see `gae`).

A step is a token with a reward of its own, besides the reward of the whole response, which is given at its last token.
The advantage of a token contains only rewards of steps that end at this token or later.

    baseline       advantage of token t; R is the reward of the response, and s_u the reward of the step ending at u
    none           R + sum over u >= t of s_u: the return-to-go (Williams 1992)
    batch          the return-to-go minus its mean over all tokens of the batch (REINFORCE++, Hu et al. 2025)
    group          A + sum over u >= t of (s_u - m) / d, where A is the response's advantage by its reward R alone, and
                   m and d are the mean and the standard deviation of all step rewards of the group
                   (process supervision of GRPO, Shao et al. 2024, section 4.1.3)
    leave-one-out  A + sum over u >= t of (s_u - b) / d, where A is the response's advantage by its reward R alone, and
                   b is the mean, over the group's other responses, of a response's mean step reward (PRIME, Cui et al.
                   2025, eq. 5)

With the scale "group", d is the standard deviation plus `EPSILON`; otherwise d is 1. The scales "batch" and "whiten"
scale the sum by its standard deviation over all tokens of the batch. Steps of branches do not count in m, d and b.

Shapes: R is the number of trajectories, B the number of tokens that the policy sampled, S the number of steps, and G
the number of groups of responses to one prompt.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.objectives.advantages import (
    EPSILON,
    groups_differ,
    scale_advantages,
    subtract_baseline,
    weigh_signs,
)
from rollflow.tasks.objectives.config import Advantage


def compute_step_advantages(
    part: Advantage,
    shaped_R: Tensor,
    steps_B: Tensor,
    starts: np.ndarray,
    groups_R: Tensor,
    branches_R: Tensor | None = None,
) -> Tensor:
    """Return the advantage of each token in float64.

    `shaped_R` are the rewards of the responses, minus their penalties. `steps_B` has the reward of each step at the
    step's last token, and NaN at all other tokens. `starts` gives the index of each trajectory's first token among the
    B tokens of the batch, and B as its last element.
    """
    counts = np.diff(starts)
    rows_B, tokens_R = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), torch.from_numpy(counts)
    at_S = torch.nonzero(~steps_B.isnan()).flatten()
    row_S = rows_B[at_S]
    episodes_R = torch.ones_like(groups_R, dtype=torch.bool) if branches_R is None else ~branches_R
    rewards_R, rewards_S = shaped_R.double(), steps_B[at_S].double()
    compares_groups = part.baseline in ("group", "leave-one-out")
    if compares_groups:
        centred_R = subtract_baseline(part, rewards_R, groups_R, tokens_R, episodes_R)
        if part.scale == "group":
            centred_R = scale_advantages(part, rewards_R, centred_R, groups_R, tokens_R, episodes_R)
        rewards_R, rewards_S = centred_R, _normalize_steps(part, rewards_S, row_S, groups_R, episodes_R)
    following_B = sum_following(torch.zeros(len(steps_B), dtype=torch.float64).index_add_(0, at_S, rewards_S), starts)
    found_B = rewards_R[rows_B] + following_B
    all_B = groups_R[rows_B], torch.ones_like(found_B), torch.ones_like(rows_B, dtype=torch.bool)
    centred_B = found_B if compares_groups else subtract_baseline(part, found_B, *all_B)
    return weigh_signs(part, centred_B if part.scale == "group" else scale_advantages(part, found_B, centred_B, *all_B))


def sum_following(values_B: Tensor, starts: np.ndarray) -> Tensor:
    """Return for each token the sum of the values of this token and all later tokens of its trajectory, in float64."""
    values, found = values_B.double().numpy(), np.zeros(len(values_B))
    for first, end in pairwise(starts):
        found[first:end] = np.cumsum(values[first:end][::-1])[::-1]
    return torch.from_numpy(found)


def _normalize_steps(part: Advantage, rewards_S: Tensor, row_S: Tensor, groups_R: Tensor, episodes_R: Tensor) -> Tensor:
    """Subtract from each step reward the baseline of its group, and divide by the deviation of its group if
    `part.scale` says so."""
    group_S, counted_S = groups_R[row_S], episodes_R[row_S]
    groups = int(groups_R.max()) + 1 if len(groups_R) else 0
    count_G, mean_G = _mean_by(group_S[counted_S], rewards_S[counted_S], groups)
    if part.baseline == "group":
        found_S = rewards_S - mean_G[group_S]
    else:
        found_S = rewards_S - _mean_of_others(rewards_S, row_S, groups_R, episodes_R)
    found_S = torch.where(groups_differ(rewards_S, group_S), found_S, 0.0)
    if part.scale != "group":
        return found_S
    square_S = (rewards_S - mean_G[group_S])[counted_S].square()
    square_G = torch.zeros(groups, dtype=torch.float64).index_add_(0, group_S[counted_S], square_S)
    return found_S / ((square_G / (count_G - 1).clamp(min=1)).sqrt() + EPSILON)[group_S]


def _mean_of_others(rewards_S: Tensor, row_S: Tensor, groups_R: Tensor, episodes_R: Tensor) -> Tensor:
    """Return for each step the mean, over the other trajectories of its group with steps, of their mean step reward; if
    no other trajectory has steps, return the step's own reward, so that the step does not count."""
    count_R, mean_R = _mean_by(row_S, rewards_S, len(groups_R))
    counts_R = (count_R > 0) & episodes_R
    groups = int(groups_R.max()) + 1 if len(groups_R) else 0
    number_G, mean_G = _mean_by(groups_R[counts_R], mean_R[counts_R], groups)
    others_R = number_G[groups_R] - counts_R.double()
    sum_R = (mean_G * number_G)[groups_R] - torch.where(counts_R, mean_R, 0.0)
    return torch.where(others_R[row_S] > 0, (sum_R / others_R.clamp(min=1))[row_S], rewards_S)


def _mean_by(index_N: Tensor, values_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return for each index below `size` the number and the mean of the values with this index; the mean of no values
    is 0."""
    count = torch.bincount(index_N, minlength=size).double()
    return count, torch.zeros(size, dtype=torch.float64).index_add_(0, index_N, values_N) / count.clamp(min=1)
