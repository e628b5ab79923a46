"""Generalized advantage estimation (Schulman et al. 2016): computes the advantages of tokens from the values of a
critic.

Shapes: R is the number of trajectories, and B the number of tokens that the policy sampled, one trajectory after the
other. Only sampled tokens count as time steps; tokens of the environment are left out. The critic's value after the
last token of a trajectory is taken as zero.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import weigh_signs, whiten


def token_rewards(rewards_R: Tensor, price_B: Tensor, starts: np.ndarray) -> Tensor:
    """Return the reward of each token: minus its price `price_B`. The last token of a trajectory also gets the
    trajectory's reward. The price of a token is its KL penalty, minus the token's own reward if it has one.

    `starts` has the index of each trajectory's first token among the B tokens, and B as its last element.
    """
    found_B = -price_B.double()
    some = np.flatnonzero(np.diff(starts))  # trajectories with at least one sampled token
    found_B[torch.from_numpy(starts[some + 1] - 1)] += rewards_R.double()[torch.from_numpy(some)]
    return found_B


def token_advantages(part: Advantage, rewards_B: Tensor, values_B: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the advantage and the return of each token in float64; the critic is trained to predict the returns.

    The advantage at token t is A_t = d_t + gamma lambda A_t+1, where d_t = r_t + gamma V_t+1 - V_t, r_t is the token's
    reward and V_t the critic's value. The return at token t is A_t + V_t, before whitening.
    """
    counts = np.diff(starts)
    at = np.repeat(np.arange(len(counts)), counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    plain_B = torch.from_numpy(_gae(part, _rows(rewards_B, at, counts), _rows(values_B, at, counts))[at])
    scaled_B = whiten(plain_B, torch.ones_like(plain_B)) if part.scale == "whiten" else plain_B
    return weigh_signs(part, scaled_B), plain_B + values_B.double()


def _rows(values_B: Tensor, at: tuple[np.ndarray, np.ndarray], counts: np.ndarray) -> np.ndarray:
    """Return the values of B tokens as a float64 matrix with one row for each trajectory, padded with zeros at the
    end."""
    found = np.zeros((len(counts), int(counts.max(initial=0)) + 1))
    found[at] = values_B.numpy()
    return found


def _gae(part: Advantage, rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.zeros_like(rewards)
    for t in range(rewards.shape[1] - 2, -1, -1):
        surprise = rewards[:, t] + part.gamma * values[:, t + 1] - values[:, t]
        found[:, t] = surprise + part.gamma * part.gae_lambda * found[:, t + 1]
    return found
