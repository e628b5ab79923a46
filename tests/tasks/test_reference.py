"""The reference policy, the penalty on the divergence from it, and the weight that follows a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollflow.tasks.learners.forward.pre_update import compute_before
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.config import Penalties
from rollflow.tasks.objectives.penalties import adapt_weight
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch
from tests.support.tiny_policy import make_policy, make_weights
from tests.support.user_code import put_in_reach
from tests.tasks.test_learner import learner, near, some_batch, token_logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def compared(folder: Path, every: int = 0, **penalties: object) -> TorchLearner:
    """Return a learner with a penalty on its divergence from the reference."""
    given = {"kl_to": "reference", "kl_weight": 0.1, **penalties}
    return learner(folder, objective={"penalties": given}, reference={"every": every}, learning_rate=0.01)


def weights_of(model: object) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4])])
def test_reference_policy_is_the_configured_version(folder: Path, every: int, expected: list[int]) -> None:
    made = compared(folder, every)
    policies, versions = [], []
    for version in range(5):
        policies.append(weights_of(made.model))
        made.step(batch(version), version)
        assert made.reference is not None
        versions.append(made.reference.version)
        reference = weights_of(made.reference._model)
        assert all(torch.equal(*pair) for pair in zip(reference, policies[expected[version]], strict=True))
    assert versions == expected


def test_kl_to_the_reference_is_zero_only_at_the_first_version(folder: Path) -> None:
    made = compared(folder)
    first, second = (made.step(batch(version), version) for version in range(2))
    assert first["kl_reference"] == 0.0
    assert second["kl_reference"] > 1e-6


def test_large_kl_weight_keeps_the_policy_near_the_reference(folder: Path) -> None:
    """With the same batches and learning rate, a large weight keeps the policy nearer to the reference."""
    found = {}
    for weight in (1e-6, 10.0):
        made = compared(folder, kl_weight=weight)
        found[weight] = [made.step(batch(version), version)["kl_reference"] for version in range(8)][-1]
    assert found[10.0] < found[1e-6] / 2


def test_kl_in_reward_is_summed_over_each_response(folder: Path) -> None:
    """The penalty is the KL estimate k1, summed over each response, from the recorded log-probs and those of the
    reference.
    """
    made = compared(folder, kl="k1", kl_in="reward")
    given = near(some_batch(), made)
    data, paid = BatchRows.of(given), torch.tensor(given.table["reward"].to_pylist())
    for row, logp in enumerate(token_logprobs(made, given)):  # here the reference equals the policy
        sampled = torch.from_numpy(data.behaviour[data.starts[row] : data.starts[row + 1]])
        paid[row] -= 0.1 * float((sampled - logp.detach()).sum())
    four = paid.view(-1, 4)
    expected = ((four - four.mean(1, keepdim=True)) / (four.std(1, keepdim=True) + 1e-4)).flatten()
    made.begin(0)
    found = compute_before(made, data).judged.advantage_B
    torch.testing.assert_close(found, expected[torch.from_numpy(data.rows)], atol=1e-5, rtol=1e-4)


def test_adapted_kl_weight_matches_a_hand_calculation() -> None:
    """The weight follows 0.1 of the error, which is clipped to 0.2; at the target it stays."""
    part = Penalties(kl_to="reference", kl_weight=0.5, kl_target=0.02)
    assert adapt_weight(part, 0.5, 0.02) == 0.5
    assert adapt_weight(part, 0.5, 0.022) == pytest.approx(0.5 * 1.01)
    assert adapt_weight(part, 0.5, 9.0) == pytest.approx(0.5 * 1.02)
    assert adapt_weight(part, 0.5, 0.0) == pytest.approx(0.5 * 0.98)
    assert adapt_weight(Penalties(kl_to="reference", kl_weight=0.5), 0.5, 9.0) == 0.5


def test_current_kl_weight_is_reported_and_next_is_stored(folder: Path) -> None:
    made = compared(folder, kl_target=1e-9)
    told = [made.step(batch(version), version)["kl_weight"] for version in range(3)]
    assert told == pytest.approx([0.1, 0.1 * 0.98, 0.1 * 0.98 * 1.02])  # no divergence at first, then too much
    other = compared(folder, kl_target=1e-9)
    other.load(made.weights(), made.state())
    assert other.kl_weight == made.kl_weight == pytest.approx(told[-1] * 1.02)


OWN = """
from rollflow.tasks.objectives.base import Objective, TokenLoss

class Near(Objective):
    uses_reference = True
    every_row = True

    def loss(self, tokens):
        loss_M = (tokens.logp_M - tokens.reference_M).square()
        return TokenLoss(loss_M, loss_M.detach() < 0)
"""


def test_user_defined_objective_gets_the_reference(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near_reference.py").write_text(OWN)
    put_in_reach(monkeypatch, tmp_path)
    made = learner(folder, objective={"kind": "import", "path": "near_reference:Near"}, learning_rate=0.01)
    assert made.step(batch(0), 0)["loss"] == 0.0
    with torch.no_grad():
        next(iter(made.model.parameters())).mul_(1.1)
    assert made.step(batch(1), 1)["loss"] > 1e-6
    assert "learner/reference.safetensors" in made.state()
