"""Tests the torch learner: compares its gradients with autograd on the plain formulas, and checks that it refuses stale
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Stale
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.optimizer.trained_tensors import TrainedTensors
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.run.config import RunConfig
from rollflow.testing.learners import batch_of, trajectory
from tests.support import oracles
from tests.support.dual import Dual
from tests.support.oracles import LONGEST, ORACLES, Row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(hidden_size=32, layers=2, heads=2), ["1 + 1 = 2"] * 10).items():
        (path / name).write_bytes(data)
    return path


def learner(folder: Path, **changes: object) -> TorchLearner:
    torch.manual_seed(0)
    config = TorchTrain(warmup_versions=0, **changes)  # type: ignore[arg-type]
    model = load_model(folder, "float32", trained=False)
    return TorchLearner(model, config, temperature=1.0, versions=10, longest=LONGEST, seed=0)


def some_batch(seed: int = 0, groups: int = 4):  # type: ignore[no-untyped-def]
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(groups):
        prompt = torch.randint(3, 250, (5,), generator=draw).tolist()
        group = []
        for sample in range(4):
            length = int(torch.randint(1, 6, (1,), generator=draw))
            response = torch.randint(3, 250, (length,), generator=draw).tolist()
            group.append(trajectory(prompt, response, sample, reward=float(sample % 2)))
        made.append(group)
    return batch_of(*made)


@pytest.mark.long
def test_learner_gradient_equals_the_plain_formula(folder: Path) -> None:
    """Micro-batches, padding and skipped rows do not change the gradient. The expected gradient is computed one row at
    a time.
    """
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
    step = made.policy.adamw.step
    made.policy.adamw.step = lambda *a, **k: (
        seen.update(  # type: ignore[method-assign]
            {n: p.grad.clone() for n, p in made.model.named_parameters()}
        )
        or step(*a, **k)
    )
    metrics = made.step(batch, 0)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in expected_model.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, atol=2e-6, rtol=1e-4)


def token_logprobs(made: TorchLearner, batch: TrajectoryBatch) -> list[Tensor]:
    """Return the log-probs of each row's response, computed one row at a time."""
    found = []
    for tokens, mask in zip(batch.table["tokens"].to_pylist(), batch.table["loss_mask"].to_pylist(), strict=True):
        logp = torch.log_softmax(made.model(input_ids=torch.tensor([tokens])).logits[0, :-1], -1)
        found.append(logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0][torch.tensor(mask[1:])])
    return found


def expected_gradient(
    made: TorchLearner, batch: TrajectoryBatch, part: Sequence[int], name: str, before: Sequence[Sequence[float]]
) -> dict[str, Tensor]:
    """Return the gradient of the rows in `part` by the preset's formula; advantages and second moments are computed
    over all rows.
    """
    logp = token_logprobs(made, batch)
    columns = [batch.table[column].to_pylist() for column in ("reward", "logprobs", "loss_mask")]
    behaviour = [[p for p, m in zip(*row, strict=True) if m] for row in zip(*columns[1:], strict=True)]

    def rows(pi: Sequence[Sequence[float]]) -> list[Row]:
        parts = zip(columns[0], pi, behaviour, before, strict=True)
        return [Row(r, i // 4, [Dual(x) for x in p], mu, old) for i, (r, p, mu, old) in enumerate(parts)]

    slopes = gradient_of_part(name, rows([row.tolist() for row in logp]), part)
    made.model.zero_grad()
    sum((logp[row] * torch.tensor(slopes[row])).sum() for row in part).backward()  # type: ignore[union-attr]
    found = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
    made.model.zero_grad()
    return found


OVER_THE_BATCH = ("ppo", "reinforce++", "m2po")  # their loss depends on rows outside the minibatch


def gradient_of_part(name: str, rows: list[Row], part: Sequence[int]) -> dict[int, list[float]]:
    """Return the derivatives of the loss of the rows `part` with respect to their log-probs; other rows affect only
    advantages and second moments.
    """
    empty = [row if i in part else replace(row, pi=[], mu=[], proximal=[]) for i, row in enumerate(rows)]
    return dict(enumerate(oracles.gradient(ORACLES[name], empty)))


@pytest.mark.parametrize(
    ("name", "minibatches"),
    [
        (name, parts)
        for name in PRESETS
        for parts in (1, 2)
        if (parts == 1 or name not in OVER_THE_BATCH)
        and name != "gigpo"  # this preset needs turns: see `test_turn_advantages.py`
    ],
)
def test_optimizer_steps_follow_the_formula_of_each_preset(folder: Path, name: str, minibatches: int) -> None:
    """The formulas hold with micro-batches, padding, skipped rows, and log-probs from before the first update."""
    made = learner(folder, micro_tokens=24, max_grad_norm=1e9, minibatches=minibatches, objective={"kind": name})
    batch = near(some_batch(groups=2), made)
    before = [row.tolist() for row in token_logprobs(made, batch)]
    seen: list[dict[str, Tensor]] = []
    step = made.policy.adamw.step

    def compared() -> None:
        part = [row for row in range(8) if row // 4 % minibatches == len(seen)]
        grads = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
        seen.append(grads)
        for key, expected in expected_gradient(made, batch, part, name, before).items():
            torch.testing.assert_close(grads[key], expected, atol=3e-6, rtol=1e-3)
        for key, parameter in made.model.named_parameters():
            parameter.grad = grads.get(key)
        step()

    made.policy.adamw.step = compared  # type: ignore[method-assign,assignment]
    made.step(batch, 0)
    assert len(seen) == minibatches
    assert any(bool(grad.any()) for grads in seen for grad in grads.values())


def near(batch: TrajectoryBatch, made: TorchLearner) -> TrajectoryBatch:
    """Return the batch with behaviour log-probs close to the learner's."""
    draw = torch.Generator().manual_seed(7)
    logprobs = batch.table["logprobs"].to_pylist()
    masks = batch.table["loss_mask"].to_pylist()
    for given, mask, row in zip(logprobs, masks, token_logprobs(made, batch), strict=True):
        off = (row + 0.3 * torch.randn(len(row), generator=draw)).tolist()
        start = mask.index(True)
        given[start : start + len(off)] = off
    where = batch.table.schema.get_field_index("logprobs")
    field = batch.table.schema.field(where)
    return replace(batch, table=batch.table.set_column(where, field, pa.array(logprobs, field.type)))


def test_learning_rate_warms_up_and_decays(folder: Path) -> None:
    made = learner(folder, learning_rate=1.0, schedule="linear")
    assert [made.learning_rate(v) for v in (0, 5, 9)] == pytest.approx([1.0, 0.5, 0.1])


def test_learning_rate_follows_half_a_cosine(folder: Path) -> None:
    """0.1 + 0.9 (1 + cos(pi v / 10)) / 2 in version v of 10."""
    made = learner(folder, learning_rate=1.0, schedule="cosine")
    found = [made.learning_rate(version) for version in (0, 1, 5, 8, 10, 12)]
    assert found == pytest.approx([1.0, 0.1 + 0.45 * (1 + 0.9510565163), 0.55, 0.1859423525, 0.1, 0.1])


@pytest.mark.parametrize(("decayed", "factor"), [("matrices", 1.0), ("all", 0.75)])
def test_weight_decay_spares_vectors(decayed: str, factor: float) -> None:
    """AdamW multiplies a weight by 1 - rate x decay = 0.75 before a step, which is 0 for a gradient of 0."""
    given = {"matrix": torch.nn.Parameter(torch.ones(2, 2)), "norm": torch.nn.Parameter(torch.ones(2))}
    trained = TrainedTensors(given, TorchTrain(weight_decay=0.5, decayed=decayed), 0.5)
    trained.begin(0.5)
    for parameter in given.values():
        parameter.grad = torch.zeros_like(parameter)
    trained.apply()
    assert torch.equal(given["matrix"].detach(), torch.full((2, 2), 0.75))
    assert torch.equal(given["norm"].detach(), torch.full((2,), factor))


def test_learner_refuses_a_stale_batch() -> None:
    """The learner itself checks the staleness of each trajectory. Here alpha is 2, and a trajectory was started under
    version 0.
    """
    actor = LearnerActor.__new__(LearnerActor)
    actor.config = RunConfig(async_ratio=2.0)
    actor._check_fresh(2, some_batch())
    with pytest.raises(Stale, match="batch 3 has a trajectory that was started under version 0"):
        actor._check_fresh(3, some_batch())


def test_batch_with_all_tokens_masked_leaves_weights_unchanged(folder: Path) -> None:
    """The made-up log-probs are several nats away from the policy's, so all squared log-ratios exceed the threshold and
    no token is kept.
    """
    made = learner(folder, objective={"kind": "m2po"})
    before = [weight.detach().clone() for weight in made.model.parameters()]
    told = made.step(some_batch(), 0)
    assert told["loss"] == 0.0
    assert all(map(torch.equal, before, made.model.parameters()))
