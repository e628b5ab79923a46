"""Tests of the critic: GAE and the clipped loss against hand calculations, its gradient, and its training."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import NotFinite
from rollflow.tasks.learners.forward.critic import explained_variance, value_loss
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.gae import token_advantages, token_rewards
from rollflow.testing.learners import batch, batch_of, saved, trajectory
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_learner import learner, some_batch

PPO = {"kind": "ppo"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def test_reward_is_at_the_last_token_and_kl_at_every_token() -> None:
    """The rows have two, zero and one tokens."""
    found = token_rewards(torch.tensor([1.0, 5.0, 0.0]), torch.tensor([0.1, 0.2, 0.3]), np.array([0, 2, 2, 3]))
    assert found.tolist() == pytest.approx([-0.1, 0.8, -0.3], abs=1e-7)


def test_token_advantages_match_a_hand_calculation() -> None:
    """gamma = lambda = 0.5. Backwards: 1 - 0.4 = 0.6; 0.5 x 0.4 - 0.2 + 0.25 x 0.6 = 0.15. The second row: 0 - 0.8."""
    part = Advantage(baseline="critic", scale="none", gamma=0.5, gae_lambda=0.5)
    rewards, values, starts = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.2, 0.4, 0.8]), np.array([0, 2, 3])
    advantage, returns = token_advantages(part, rewards, values, starts)
    assert advantage.tolist() == pytest.approx([0.15, 0.6, -0.8], abs=1e-7)
    assert returns.tolist() == pytest.approx([0.35, 1.0, 0.0], abs=1e-7)


def test_token_rewards_are_float64() -> None:
    """They must be float64, because GAE adds up thousands of rewards."""
    found = token_rewards(torch.tensor([0.1]), torch.tensor([0.1, 0.2]), np.array([0, 2]))
    assert found.dtype == torch.float64
    assert found.tolist() == [-float(np.float32(0.1)), float(np.float32(0.1)) - float(np.float32(0.2))]


def test_advantage_sign_weights_apply_after_whitening() -> None:
    """Advantages 1 and -1 have mean 0 and deviation sqrt(2); returns keep their values."""
    part = Advantage(baseline="critic", scale="whiten", negative_weight=0.5)
    advantage, returns = token_advantages(part, torch.tensor([1.0, -1.0]), torch.zeros(2), np.array([0, 1, 2]))
    assert advantage.tolist() == pytest.approx([2**-0.5, -0.5 * 2**-0.5])
    assert returns.tolist() == [1.0, -1.0]


def test_clipped_value_loss_matches_a_hand_calculation() -> None:
    """Values are clipped to 0.2 around 0: 0.5 counts as 0.2 where that is worse, and -0.3 towards -1 as -0.2."""
    found = value_loss(torch.tensor([0.1, 0.5, -0.3]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.2)
    assert found.tolist() == pytest.approx([0.9**2 / 2, 0.8**2 / 2, 0.8**2 / 2])


def test_explained_variance_matches_a_hand_calculation() -> None:
    """The returns have variance 0.25, the errors 0.0625."""
    returns = torch.tensor([0.0, 1.0])
    assert explained_variance(torch.tensor([0.25, 0.75]), returns) == pytest.approx(0.75)
    assert explained_variance(torch.tensor([7.0, 7.0]), returns) == 0.0
    assert explained_variance(torch.tensor([0.1, 0.9]), torch.ones(2)) == 0.0


@pytest.mark.parametrize("model", ["own", "head"])
def test_critic_update_follows_the_plain_formula(folder: Path, model: str) -> None:
    """One row at a time, without padding: mean over tokens of (value - reward)^2 / 2, at the second version."""
    made = learner(folder, micro_tokens=24, max_grad_norm=1e9, objective=PPO, critic={"model": model})
    made.step(some_batch(), 0)
    assert made.critic is not None
    values, decoder = copy.deepcopy(made.critic.model), copy.deepcopy(made.model.get_decoder())
    seen: dict[str, Tensor] = {}
    step = made.critic.optimized.adamw.step

    def noted() -> None:
        seen.update({n: p.grad.clone() for n, p in made.critic.model.named_parameters() if p.grad is not None})  # type: ignore[union-attr]
        step()

    made.critic.optimized.adamw.step = noted  # type: ignore[method-assign,assignment]
    data = some_batch(seed=3)
    metrics = made.step(data, 1)
    if model == "head":  # computed from the policy's hidden states after its own update
        decoder.load_state_dict(made.model.get_decoder().state_dict())
    loss = plain_loss(values, decoder if model == "head" else values.decoder, data)
    loss.backward()
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in values.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, atol=2e-6, rtol=1e-4)


def plain_loss(values: torch.nn.Module, decoder: object, data: TrajectoryBatch) -> Tensor:
    squares = []
    for tokens, mask, reward in zip(
        *(data.table[c].to_pylist() for c in ("tokens", "loss_mask", "reward")), strict=True
    ):
        hidden = decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0, :-1]  # type: ignore[operator]
        if values.decoder is None:
            hidden = hidden.detach()
        value = values.head(hidden).squeeze(-1)[torch.tensor(mask[1:])]
        squares.append((value - reward).square() / 2)
    return torch.cat(squares).mean()


@pytest.mark.parametrize("model", ["own", "head"])
def test_critic_learns_the_rewards(folder: Path, model: str) -> None:
    """The first token of an answer determines its reward, and the policy hardly changes."""
    made = learner(folder, objective=PPO, critic={"model": model, "learning_rate": 0.01}, learning_rate=1e-12)
    first, *_, last = [made.step(batch(0), version % 10) for version in range(60)]
    assert first["explained_variance"] == first["value_mean"] == 0.0
    assert last["explained_variance"] > (0.6 if model == "own" else 0.3)
    assert last["value_loss"] < first["value_loss"] / 2


def test_new_critic_starts_from_the_current_policy(folder: Path) -> None:
    """A cold start changes the policy's weights after the learner was built and before its first step."""
    made = learner(folder, objective=PPO, critic={"learning_rate": 1e-12})
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1.5)
    before = {name: p.detach().clone() for name, p in made.model.get_decoder().named_parameters()}
    made.step(batch(0), 0)
    assert made.critic is not None
    for name, parameter in made.critic.model.decoder.named_parameters():  # type: ignore[union-attr]
        torch.testing.assert_close(parameter.detach(), before[name], atol=1e-9, rtol=0)


def test_critic_changes_the_policy_only_through_its_values(folder: Path) -> None:
    """At the first version, the values are zero for any learning rate of the critic; at the second, they differ."""
    slow, fast = (learner(folder, objective=PPO, critic={"learning_rate": rate}) for rate in (1e-12, 1e-2))
    for made in (slow, fast):
        made.step(batch(0), 0)
    assert saved(slow)[0] == saved(fast)[0]
    for made in (slow, fast):
        made.step(batch(1), 1)
    assert saved(slow)[0] != saved(fast)[0]


def test_nonfinite_loss_leaves_the_critic_unchanged(folder: Path) -> None:
    made = learner(folder, objective=PPO)
    made.step(batch(0), 0)
    assert made.critic is not None
    with torch.no_grad():
        made.critic.model.head.bias.fill_(1e30)
    before = {name: p.detach().clone() for name, p in made.critic.model.named_parameters()}
    why = r"version 2 is not trained, because .* of batch 1 is (inf|nan); start another run .* lower train\."
    with pytest.raises(NotFinite, match=why):
        made.step(batch(1), 1)
    assert all(torch.equal(p.detach(), before[name]) for name, p in made.critic.model.named_parameters())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_empty_batch_changes_no_weight_and_reports_no_nan(folder: Path, kind: str) -> None:
    made = learner(folder, objective={"kind": kind}, minibatches=2)
    empty = batch_of(*([trajectory([3, 4], [], i, reward=float(i)) for i in range(2)] for _ in range(2)))
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    assert all(math.isfinite(value) for value in made.step(empty, 0).values())
    assert all(torch.equal(p.detach(), before[name]) for name, p in made.model.named_parameters())


def test_objective_without_a_critic_builds_no_critic(folder: Path) -> None:
    made = learner(folder)
    made.step(batch(0), 0)
    assert made.critic is None
    assert not any("critic" in name for name in made.state())
