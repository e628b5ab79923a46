"""The torch learner: gradients against autograd on the plain formula, exact restore, exact replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollflow.storage.errors import Stale
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.config import RunConfig
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from tests.tasks.test_algorithms import batch_of, trajectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(hidden_size=32, layers=2, heads=2), ["1 + 1 = 2"] * 10).items():
        (path / name).write_bytes(data)
    return path


def learner(folder: Path, **changes: object) -> TorchLearner:
    torch.manual_seed(0)
    config = TorchTrain(warmup_versions=0, **changes)  # type: ignore[arg-type]
    return TorchLearner(load_model(folder, "float32", trained=False), config, temperature=1.0, versions=10, seed=0)


def some_batch(seed: int = 0):  # type: ignore[no-untyped-def]
    draw = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(4):
        prompt = torch.randint(3, 250, (5,), generator=draw).tolist()
        group = []
        for sample in range(4):
            length = int(torch.randint(1, 6, (1,), generator=draw))
            response = torch.randint(3, 250, (length,), generator=draw).tolist()
            group.append(trajectory(prompt, response, sample, reward=float(sample % 2)))
        groups.append(group)
    return batch_of(*groups)


@pytest.mark.long
def test_the_gradient_is_that_of_the_plain_formula(folder: Path) -> None:
    """Micro-batches, padding and the skipped rows change nothing: compared with one row at a time."""
    batch, made = some_batch(), learner(folder, micro_tokens=24, max_grad_norm=1e9)
    expected_model = learner(folder).model
    rewards = torch.tensor(batch.table["reward"].to_pylist())
    total = sum(sum(m) for m in batch.table["loss_mask"].to_pylist())
    loss = torch.zeros(())
    for row, (tokens, mask, logprobs) in enumerate(
        zip(*(batch.table[c].to_pylist() for c in ("tokens", "loss_mask", "logprobs")), strict=True)
    ):
        ids = torch.tensor([tokens])
        logp = torch.log_softmax(expected_model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        chosen = torch.tensor(mask[1:])
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        advantage = (rewards[row] - group.mean()) / (group.std() + 1e-4)
        ratio = (logp - torch.tensor(logprobs[1:]))[chosen].exp()
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / total
    loss.backward()
    seen: dict[str, torch.Tensor] = {}
    step = made.optimizer.step
    made.optimizer.step = lambda *a, **k: (
        seen.update(  # type: ignore[method-assign]
            {n: p.grad.clone() for n, p in made.model.named_parameters()}
        )
        or step(*a, **k)
    )
    metrics = made.step(batch, 0)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in expected_model.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, atol=2e-6, rtol=1e-4)


def test_the_learning_rate_warms_up_and_decays(folder: Path) -> None:
    made = learner(folder, learning_rate=1.0, schedule="linear")
    assert [made.learning_rate(v) for v in (0, 5, 9)] == pytest.approx([1.0, 0.5, 0.1])


def test_the_learner_refuses_a_stale_batch_whatever_was_committed() -> None:
    """The bound is checked once more on the rows: batches started under version 0, alpha 2."""
    actor = LearnerActor.__new__(LearnerActor)
    actor.config = RunConfig(async_ratio=2.0)
    actor.version = 2
    actor._check_fresh(some_batch())
    actor.version = 3
    with pytest.raises(Stale, match="batch 3 holds a trajectory started under version 0"):
        actor._check_fresh(some_batch())
