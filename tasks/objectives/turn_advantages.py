"""Computes the advantages of turns: each token of a turn gets credit for the rewards of this turn and of later
turns.

An episode has the turns k = 1 to K, counted over all of its branches. The reward r_k of a turn is the sum of its
tokens' rewards, minus their KL penalties; the last turn also gets the reward of the episode. The return of a turn is
G_k = r_k + gamma G_k+1, with one factor gamma for each turn, as in ROLL and verl-agent.

    credit  baseline         advantage of a token in turn k
    turn    none             G_k: REINFORCE with discounted returns (Williams 1992)
    turn    batch            G_k minus its mean over all tokens of the batch (REINFORCE++, Hu et al. 2025)
    turn    group            (G_k - m) / d, where m and d are the mean and the deviation of the returns of all turns k
                             of the group (turns are compared by number, as in MT-GRPO, Zeng et al. 2025)
    turn    leave-one-out    the same, where m is the mean of the other turns k of the group
    state   group            (R - M) / D + omega (G_k - m) / d, where R is the sum of the episode's rewards, M and D are
                             the mean and the deviation of R in the group, and m and d are those of the returns of the
                             group's turns that acted in the same state (GiGPO, Feng et al. 2025, eqs. 3 to 8)
    state   leave-one-out    the same, where M and m are means of the others

With the scale "group", d and D are standard deviations plus `EPSILON`; otherwise they are 1, GiGPO's F_norm = 1. The
scales "batch" and "whiten" scale the advantages by their standard deviation over all tokens of the batch. A turn that
is compared with no other turn has (G_k - m) / d = 0. A turn whose state has no name is compared with no other turn.

Shapes: B is the number of tokens that the policy sampled, R the number of trajectories, E the number of episodes, and T
the number of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollflow.storage.records import UNNAMED_STATE
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import scale_advantages, subtract_baseline, weigh_signs
from rollflow.tasks.objectives.rows import BatchRows


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a batch that contain tokens with loss mask 1, in the order of the batch."""

    of_tokens: np.ndarray  # int64, B: turn of each token with loss mask 1
    episodes: np.ndarray  # int64, T: episode of each turn
    numbers: np.ndarray  # int64, T: number of each turn in its episode, from 0
    states: np.ndarray  # int64, T: hash of the state in which each turn acted; `UNNAMED_STATE` if the state has no name


def find_turns(data: BatchRows) -> Turns:
    """Return the turns of a batch; a row whose turns are not recorded is a single turn."""
    recorded = np.zeros(0, np.int64) if data.turn_starts is None else data.turn_starts
    states = np.zeros(len(recorded), np.int64) if data.turn_states is None else data.turn_states
    rows = np.searchsorted(data.offsets, recorded, "right") - 1
    starts = np.where(np.diff(rows, prepend=-1) > 0, data.offsets[rows], recorded)  # a row begins with its first turn
    single = np.setdiff1d(np.arange(len(data.rewards)), rows)
    rows, starts = np.concatenate([rows, single]), np.concatenate([starts, data.offsets[single]])
    states = np.concatenate([states, np.full(len(single), UNNAMED_STATE)])
    ordered = np.lexsort((starts, rows))
    at, first, of_tokens = np.unique(
        np.searchsorted(starts[ordered], data.chosen, "right") - 1, return_index=True, return_inverse=True
    )
    rows = data.rows[first]
    episodes = rows if data.episodes is None else data.episodes[rows]
    return Turns(of_tokens, episodes, _count_up(episodes), states[ordered][at])


def _count_up(episodes: np.ndarray) -> np.ndarray:
    """Return for each turn the number of earlier turns of its episode."""
    found, seen = np.zeros(len(episodes), np.int64), dict[int, int]()
    for turn, episode in enumerate(episodes.tolist()):
        found[turn] = seen[episode] = seen.get(episode, -1) + 1
    return found


def compute_turn_advantages(part: Advantage, shaped_R: Tensor, data: BatchRows, price_B: Tensor) -> Tensor:
    """Return the advantage of each token in float64.

    `shaped_R` are the rewards of the trajectories, minus their penalties for length. The reward of an episode is the
    reward of its last branch. `price_B` is the KL penalty of each token.
    """
    turns, order = find_turns(data), data.order_by_episode()
    final_E = shaped_R.double()[torch.from_numpy(order.last)]
    groups_E, episode_T = torch.from_numpy(data.groups[order.first]), torch.from_numpy(turns.episodes)
    reward_T = _sum_rewards(turns, data, price_B, final_E)
    returns = discount_returns(reward_T.tolist(), turns.episodes.tolist(), part.gamma)
    return_T = torch.tensor(returns, dtype=torch.float64)
    rows_B, turn_B = torch.from_numpy(data.rows), torch.from_numpy(turns.of_tokens)
    if part.baseline in ("group", "leave-one-out"):
        shared = turns.numbers if part.credit == "turn" else _name_states(turns.states)
        found_T = _compare(part, return_T, _number_pairs(groups_E[episode_T].numpy(), shared))
        if part.credit == "state":
            # An episode without tokens has no turn, but its reward counts in the mean of its group.
            empty_E = torch.from_numpy(np.diff(order.starts) == 0)
            total_E = torch.where(empty_E, final_E, 0.0).index_add(0, episode_T, reward_T)
            found_T = _compare(part, total_E, groups_E)[episode_T] + part.state_weight * found_T
    else:
        found_T = return_T
    all_B = torch.zeros_like(rows_B), torch.ones(len(rows_B)).double(), torch.ones_like(rows_B, dtype=torch.bool)
    found_B = found_T[turn_B]
    if part.baseline == "batch":
        found_B = subtract_baseline(part, found_B, *all_B)
    return weigh_signs(part, found_B if part.scale == "group" else scale_advantages(part, found_B, found_B, *all_B))


def discount_returns(rewards: Sequence[float], episodes: Sequence[int], gamma: float) -> list[float]:
    """Return for each turn the discounted sum of its own reward and the rewards of its episode's later turns."""
    found, following = [0.0] * len(rewards), dict[int, float]()
    for turn in reversed(range(len(rewards))):
        found[turn] = following[episodes[turn]] = rewards[turn] + gamma * following.get(episodes[turn], 0.0)
    return found


def _sum_rewards(turns: Turns, data: BatchRows, price_B: Tensor, final_E: Tensor) -> Tensor:
    """Return the reward of each turn: the rewards of its tokens minus their KL penalties. The last turn of an episode
    also gets the reward of the episode."""
    paid_B = -price_B.double().numpy()
    if data.token_rewards is not None:
        paid_B = paid_B + np.nan_to_num(data.token_rewards.astype(np.float64))
    found = np.bincount(turns.of_tokens, paid_B, minlength=len(turns.episodes)).astype(np.float64)
    last = len(turns.episodes) - 1 - np.unique(turns.episodes[::-1], return_index=True)[1]
    found[last] += final_E.numpy()[turns.episodes[last]]
    return torch.from_numpy(found)


def _compare(part: Advantage, values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Subtract from each value the baseline of its group; with the scale "group", also divide by the standard
    deviation.
    """
    ones_N, all_N = torch.ones_like(values_N), torch.ones_like(groups_N, dtype=torch.bool)
    centred_N = subtract_baseline(part, values_N, groups_N, ones_N, all_N)
    return scale_advantages(part, values_N, centred_N, groups_N, ones_N, all_N) if part.scale == "group" else centred_N


def _name_states(states: np.ndarray) -> np.ndarray:
    """Return a number for each turn; numbers are equal only for turns that acted in the same named state."""
    alone = states == UNNAMED_STATE
    found = np.unique(states, return_inverse=True)[1] + len(states)
    found[alone] = np.arange(len(states))[alone]
    return found


def _number_pairs(one: np.ndarray, other: np.ndarray) -> Tensor:
    """Number the different pairs of two arrays from 0; return the number of each pair."""
    pairs = np.stack([one, other], 1)
    return torch.from_numpy(np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1))
