"""Computes what a policy version needs before its first update: advantages, log-probs of the reference policy, and
values of the critic.

In shapes, R is the number of rows (trajectories), and B the number of tokens with loss mask 1 in the batch, one row
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.learners.forward.critic import explained_variance
from rollflow.tasks.learners.forward.models import TrainedModels
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import compute_advantages, shape_rewards
from rollflow.tasks.objectives.gae import token_advantages, token_rewards
from rollflow.tasks.objectives.penalties import kl_estimate
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.objectives.step_advantages import compute_step_advantages
from rollflow.tasks.objectives.token_rewards import check_states, check_token_rewards
from rollflow.tasks.objectives.turn_advantages import compute_turn_advantages


@dataclass(frozen=True, slots=True)
class BatchTargets:
    """Advantages of a batch and the targets of the critic, both computed from rewards."""

    advantage_B: Tensor  # advantage of each token, in the data type of the rewards
    signal_R: np.ndarray  # bool: True if a token of the row has an advantage other than zero
    returns_B: Tensor | None = None  # float64: the critic's targets; None without a critic


@dataclass(frozen=True, slots=True)
class PreUpdate:
    """Values that are computed before the first update of a policy version. Values that the objective does not need are
    None; log-probs are in nats."""

    judged: BatchTargets
    behaviour_B: Tensor  # log-probs under the behaviour policy, which sampled the tokens
    proximal_B: Tensor | None  # log-probs of the policy before the update; None if a single update computes them itself
    kept_B: Tensor | None  # bool: True if the token has a loss; only for objectives that need the whole batch
    reference_B: Tensor | None  # log-probs of the reference policy
    values_B: Tensor | None  # the critic's values

    @property
    def signal_R(self) -> np.ndarray:
        """True for each row in which at least one token has an advantage other than zero."""
        return self.judged.signal_R

    def metrics(self) -> Mapping[str, float]:
        """Return the critic's explained variance and mean value as metrics; return an empty mapping if there is no
        critic.
        """
        if self.values_B is None or self.judged.returns_B is None or not len(self.values_B):
            return {}
        explained = explained_variance(self.values_B, self.judged.returns_B)
        return {"explained_variance": explained, "value_mean": float(self.values_B.mean())}


def compute_before(roles: TrainedModels, data: BatchRows) -> PreUpdate:
    """Compute the values that are needed before the first update of a policy version, with one forward pass of each
    needed model.
    """
    every = range(len(data.rewards))
    reference_B = roles.compute_tokens(data, every, roles.reference_logprobs) if roles.reference else None
    values_B = roles.compute_tokens(data, every, roles.critic.values) if roles.critic else None
    behaviour_B = torch.from_numpy(data.behaviour)
    price_B = _kl_price(roles, behaviour_B, reference_B)
    if data.token_rewards is not None:
        check_token_rewards(roles.config.objective)
    check_states(roles.config.objective, has_states=data.turn_states is not None)
    part = roles.config.objective.advantage
    dtype = getattr(torch, roles.config.advantage_dtype)
    judged = compute_targets(part, data, roles.longest, price_B=price_B, values_B=values_B, dtype=dtype)
    proximal_B = _proximal(roles, data, judged)
    whole = proximal_B if roles.objective.uses_batch else None
    kept_B = None if whole is None else roles.objective.keep(whole, behaviour_B)
    return PreUpdate(judged, behaviour_B, proximal_B, kept_B, reference_B, values_B)


def _kl_price(roles: TrainedModels, behaviour_B: Tensor, reference_B: Tensor | None) -> Tensor | None:
    """Return the KL penalty of each token, to be subtracted from the rewards; None if the KL penalty is not part of the
    rewards."""
    if reference_B is None or roles.penalties.kl_in != "reward":
        return None
    return roles.kl_weight * kl_estimate(roles.penalties, behaviour_B, reference_B)


def _proximal(roles: TrainedModels, data: BatchRows, judged: BatchTargets) -> Tensor | None:
    """Return the log-probs of the policy before the update, for the rows that are trained on; None if no forward pass
    is needed.

    With a single update, the update itself computes the log-probs of the policy before the update.
    """
    if roles.objective.uses_batch:
        return roles.compute_tokens(data, range(len(data.rewards)), roles.own_logprobs)
    if roles.objective.uses_proximal and roles.config.minibatches > 1:
        rows = roles.select_rows(range(len(data.rewards)), judged.signal_R)
        return roles.compute_tokens(data, rows, roles.own_logprobs)
    return None


def compute_targets(
    part: Advantage,
    data: BatchRows,
    longest: int,
    *,
    price_B: Tensor | None = None,
    values_B: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> BatchTargets:
    """Compute the advantages of a batch in the data type `dtype`.

    `price_B` is subtracted from the rewards; `values_B` are the values of the critic, or None without a critic. A
    reward of a single token (`data.token_rewards`) is given at this token, not to the whole trajectory.
    """
    given_R, tokens_R = torch.tensor(data.rewards), torch.from_numpy(data.masked_tokens)
    rewards_R = given_R.double() if dtype == torch.float64 or _may_overflow(given_R, tokens_R) else given_R
    price_B = torch.zeros(len(data.chosen)) if price_B is None else price_B
    rows_B, returns_B = torch.from_numpy(data.rows), None
    if values_B is not None:
        shaped_R = shape_rewards(part, rewards_R, tokens_R, longest)
        found_B, returns_B = _credit_by_critic(part, shaped_R, data, price_B, values_B)
    elif part.credit != "episode":
        found_B = compute_turn_advantages(part, shape_rewards(part, rewards_R, tokens_R, longest), data, price_B)
    else:
        paid_R = rewards_R.index_add(0, rows_B, -price_B.to(rewards_R))
        if data.token_rewards is None:
            branches_R = None if data.episodes is None else torch.from_numpy(data.branches)
            groups_R = torch.from_numpy(data.groups)
            found_B = compute_advantages(part, paid_R, groups_R, tokens_R, longest, branches_R)[rows_B]
        else:
            found_B = compute_step_advantages(part, shape_rewards(part, paid_R, tokens_R, longest), data)
    signal_R = np.zeros(len(data.rewards), dtype=bool)
    signal_R[data.rows[found_B.numpy() != 0]] = True
    return BatchTargets(found_B.to(given_R.dtype), signal_R, returns_B)


def _credit_by_critic(
    part: Advantage, shaped_R: Tensor, data: BatchRows, price_B: Tensor, values_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the advantage and the return of each token, from the values of a critic. An episode with several branches
    counts as one sequence, with the reward of its last branch."""
    order = data.order_by_episode()
    if data.token_rewards is not None:
        price_B = price_B.double() - torch.from_numpy(data.token_rewards).double().nan_to_num()
    tokens, last = torch.from_numpy(order.tokens), torch.from_numpy(order.last)
    rewards_B = token_rewards(shaped_R[last], price_B[tokens], order.starts)
    found = token_advantages(part, rewards_B, values_B[tokens], order.starts)
    advantage_B, return_B = (torch.empty_like(one_B).index_copy_(0, tokens, one_B) for one_B in found)
    return advantage_B, return_B


def _may_overflow(rewards_R: Tensor, tokens_R: Tensor) -> bool:
    """Return True if a sum of squared rewards may exceed the range of float32.

    After an overflow, the standard deviation would be infinite and all advantages would be zero.
    """
    squares_R = rewards_R.double().square() * tokens_R.clamp(min=1)
    return float(squares_R.sum()) > torch.finfo(rewards_R.dtype).max
