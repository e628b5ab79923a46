"""Computes the advantages of tokens from rewards of tokens or steps, without a critic.

A step is a token with a reward of its own. The reward of the whole response is given separately, at its last token. The
advantage of a token contains only rewards of steps that end at the token or later.

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
scale the sum by its standard deviation over all tokens of the batch.

An episode of several branches counts as one response: its reward counts in A once, and its steps are those of all
branches.

Shapes: R is the number of trajectories, E the number of episodes, B the number of tokens that the policy sampled, S the
number of steps, and G the number of groups of responses to one prompt.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import (
    EPSILON,
    groups_differ,
    scale_advantages,
    subtract_baseline,
    weigh_signs,
)
from rollflow.tasks.objectives.rows import BatchRows, EpisodeOrder


def compute_step_advantages(part: Advantage, shaped_R: Tensor, data: BatchRows) -> Tensor:
    """Return the advantage of each token in float64.

    `shaped_R` are the rewards of the responses, minus their penalties. `data.token_rewards` has the reward of each step
    at the step's last token, and NaN elsewhere.
    """
    steps_B, groups_R = torch.from_numpy(data.token_rewards), torch.from_numpy(data.groups)
    rows_B, tokens_R = torch.from_numpy(data.rows), torch.from_numpy(data.masked_tokens)
    order = data.order_by_episode()
    episode_R = torch.arange(len(groups_R)) if data.episodes is None else torch.from_numpy(data.episodes)
    counted_R = torch.zeros(len(groups_R), dtype=torch.bool)
    counted_R[torch.from_numpy(order.first)] = True
    at_S = torch.nonzero(~steps_B.isnan()).flatten()
    episode_S, groups_E = episode_R[rows_B[at_S]], groups_R[torch.from_numpy(order.first)]
    rewards_R, rewards_S = shaped_R.double(), steps_B[at_S].double()
    compares_groups = part.baseline in ("group", "leave-one-out")
    if compares_groups:
        centred_R = subtract_baseline(part, rewards_R, groups_R, tokens_R, counted_R)
        if part.scale == "group":
            centred_R = scale_advantages(part, rewards_R, centred_R, groups_R, tokens_R, counted_R)
        rewards_R, rewards_S = centred_R, _normalize_steps(part, rewards_S, episode_S, groups_E)
    found_B = torch.zeros(len(steps_B), dtype=torch.float64).index_add_(0, at_S, rewards_S)
    following_B = sum_following(found_B, order)
    found_B = rewards_R[rows_B] + following_B
    all_B = groups_R[rows_B], torch.ones_like(found_B), torch.ones_like(rows_B, dtype=torch.bool)
    centred_B = found_B if compares_groups else subtract_baseline(part, found_B, *all_B)
    return weigh_signs(part, centred_B if part.scale == "group" else scale_advantages(part, found_B, centred_B, *all_B))


def sum_following(values_B: Tensor, order: EpisodeOrder) -> Tensor:
    """Return for each token the sum of the values of its episode from this token on, in float64."""
    values, found = values_B.double().numpy()[order.tokens], np.zeros(len(values_B))
    for first, end in pairwise(order.starts):
        found[order.tokens[first:end]] = np.cumsum(values[first:end][::-1])[::-1]
    return torch.from_numpy(found)


def _normalize_steps(part: Advantage, rewards_S: Tensor, episode_S: Tensor, groups_E: Tensor) -> Tensor:
    """Subtract from each step reward the baseline of its group; with the scale "group", also divide by the standard
    deviation.
    """
    group_S = groups_E[episode_S]
    groups = int(groups_E.max()) + 1 if len(groups_E) else 0
    count_G, mean_G = _mean_by(group_S, rewards_S, groups)
    if part.baseline == "group":
        found_S = rewards_S - mean_G[group_S]
    else:
        found_S = rewards_S - _mean_of_others(rewards_S, episode_S, groups_E)
    found_S = torch.where(groups_differ(rewards_S, group_S), found_S, 0.0)
    if part.scale != "group":
        return found_S
    square_S = (rewards_S - mean_G[group_S]).square()
    square_G = torch.zeros(groups, dtype=torch.float64).index_add_(0, group_S, square_S)
    return found_S / ((square_G / (count_G - 1).clamp(min=1)).sqrt() + EPSILON)[group_S]


def _mean_of_others(rewards_S: Tensor, episode_S: Tensor, groups_E: Tensor) -> Tensor:
    """Return the baseline of each step: the mean step reward of each other episode of the group, averaged over these
    episodes. Episodes without steps do not count in this average. If no other episode of the group has a step, the
    baseline of a step is its own reward, so that the step has no effect.
    """
    count_E, mean_E = _mean_by(episode_S, rewards_S, len(groups_E))
    counts_E = count_E > 0
    groups = int(groups_E.max()) + 1 if len(groups_E) else 0
    number_G, mean_G = _mean_by(groups_E[counts_E], mean_E[counts_E], groups)
    others_E = number_G[groups_E] - counts_E.double()
    sum_E = (mean_G * number_G)[groups_E] - torch.where(counts_E, mean_E, 0.0)
    return torch.where(others_E[episode_S] > 0, (sum_E / others_E.clamp(min=1))[episode_S], rewards_S)


def _mean_by(index_N: Tensor, values_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return for each index below `size` the number of values with this index, and their mean (0 if there are none)."""
    count = torch.bincount(index_N, minlength=size).double()
    return count, torch.zeros(size, dtype=torch.float64).index_add_(0, index_N, values_N) / count.clamp(min=1)
