"""Tests the observation loss (on tokens of the environment): its tokens, its gradient compared with autograd on the
plain formula, and each kind of learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Branch, StopReason, Trajectory
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.forward import token_logprobs
from rollflow.tasks.learners.forward.observations import ObservationLoss
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.presets import PresetName
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.run.config import RunConfig
from rollflow.testing.learners import batch_of, saved
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_fsdp import in_parts
from tests.tasks.test_learner import learner
from tests.tasks.test_ranks import NEAR, farthest, trained

WEIGHT = 0.3
PLAIN = {"kind": "rloo", "aggregation": "token-mean", "observation_weight": WEIGHT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def build_row(sample: int, tokens: Sequence[int], mask: Sequence[bool], reward: float = 0.0) -> Trajectory:
    logprobs, versions = [-0.7 * one for one in mask], [int(one) - 1 for one in mask]
    return Trajectory(sample, 0, [*tokens], [*mask], logprobs, versions, reward, "", StopReason.STOP)


def episodes(seed: int, *, with_signal: bool = True) -> TrajectoryBatch:
    """Return four groups of four episodes of two turns. The rewards of the first two groups are equal."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=draw).tolist()

    groups = []
    for group in range(4):
        prompt, rows = tokens(9), []
        for sample in range(4):
            sizes = [int(size) for size in torch.randint(1, 5, (4,), generator=draw)]
            parts = [(tokens(size), place % 2 == 0) for place, size in enumerate(sizes)]
            whole = prompt + [token for part, _ in parts for token in part]
            mask = [False] * len(prompt) + [chosen for part, chosen in parts for _ in part]
            rows.append(build_row(sample, whole, mask, float(with_signal and group > 1 and sample % 2)))
        groups.append(rows)
    return batch_of(*groups)


# --- which tokens ----------------------------------------------------------------------------------------------------


@given(masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_unsampled_tokens_after_the_first_sampled_are_observed(masks: list[list[bool]]) -> None:
    rows = [build_row(sample, [5] * (1 + len(mask)), [False, *mask]) for sample, mask in enumerate(masks)]
    observed, begin, expected = BatchRows.of(batch_of(rows)).with_observed().observed, 0, []
    for mask in masks:
        places = [t for t, chosen in enumerate(mask) if not chosen and any(mask[:t])]
        expected.append([begin + 1 + t for t in places])
        begin += 1 + len(mask)
    assert observed is not None
    assert [part.tolist() for part in torch.from_numpy(observed.indices).split(observed.counts.tolist())] == expected


def test_context_of_a_branch_gets_no_observation_loss() -> None:
    """A branch begins with a context that was rewritten from earlier turns. The tokens of this context get no
    observation loss.
    """
    first = build_row(0, [3, 4, 5, 6, 7], [False, False, True, False, True])
    branch = replace(build_row(1, [3, 4, 9, 9, 9, 8], [False] * 4 + [True, False]), branch=Branch(0, 2))
    observed = BatchRows.of(batch_of([first, branch])).with_observed().observed
    assert observed is not None
    assert observed.indices.tolist() == [3, 10]


# --- the gradient ----------------------------------------------------------------------------------------------------


def expected_gradient(
    made: TorchLearner, batch: TrajectoryBatch, part: Sequence[int], mean: str
) -> tuple[dict[str, Tensor], float]:
    """Return the gradient of the loss -A log pi plus the observation loss, computed one row at a time; also return the
    observation loss.
    """
    columns = [batch.table[name].to_pylist() for name in ("tokens", "loss_mask", "reward")]
    policy, observed = [], []
    for row, (tokens, mask, reward) in enumerate(zip(*columns, strict=True)):
        others = [columns[2][i] for i in range(row // 4 * 4, row // 4 * 4 + 4) if i != row]
        logp = torch.log_softmax(made.model(input_ids=torch.tensor([tokens])).logits[0, :-1], -1)
        logp = logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        begin = mask.index(True)
        if row in part:
            policy.append(-(reward - sum(others) / 3) * logp[torch.tensor(mask[1:])])
            behind = [not one and t > begin for t, one in enumerate(mask)][1:]
            observed.append(-logp[torch.tensor(behind)])
    if mean == "sequence-mean":
        losses = [torch.stack([one.mean() for one in found]).mean() for found in (policy, observed)]
    else:
        losses = [torch.cat(found).mean() for found in (policy, observed)]
    made.model.zero_grad()
    (losses[0] + WEIGHT * losses[1]).backward()
    found = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
    made.model.zero_grad()
    return found, float(losses[1].detach())


@pytest.mark.parametrize(
    ("keys", "chunk"),
    [
        ({}, 1000),
        ({"share_prefixes": "none", "micro_tokens": 24}, 1000),
        ({"minibatches": 2}, 1000),
        ({}, 3),
        ({"objective": {**PLAIN, "aggregation": "sequence-mean"}}, 3),
        ({"objective": {**PLAIN, "penalties": {"entropy_weight": 1e-9}}}, 1000),
        ({"checkpoint_activations": True, "minibatches": 2}, 3),
    ],
)
@pytest.mark.parametrize("with_signal", [True, False])
def test_observation_gradient_equals_the_plain_formula(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], chunk: int, with_signal: bool
) -> None:
    """Packing, shared prompts, minibatches, logits in chunks, and rows without an advantage do not change the
    gradient.
    """
    given = {"objective": PLAIN, "max_grad_norm": 1e9, **keys}
    made, batch = learner(folder, **given), episodes(1, with_signal=with_signal)
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * made.token_logprobs._head.vocabulary * chunk)
    parts, seen, step = made.config.minibatches, list[float](), made.policy.adamw.step

    def compared() -> None:
        part = [row for row in range(16) if row // 4 % parts == len(seen)]
        grads = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
        expected, loss = expected_gradient(made, batch, part, made.config.objective.aggregation)
        seen.append(loss)
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, atol=3e-6, rtol=1e-3)
        for name, parameter in made.model.named_parameters():
            parameter.grad = grads.get(name)
        step()

    made.policy.adamw.step = compared  # type: ignore[method-assign,assignment]
    told = made.step(batch, 0)
    assert len(seen) == parts
    assert told["observation_loss"] == pytest.approx(sum(seen) / parts, rel=1e-5)
    assert ("ratio_mean" in told) == (with_signal or made.objective.every_row)


def test_observed_tokens_are_learned_without_rewards(folder: Path) -> None:
    made, batch = learner(folder, learning_rate=3e-3, objective=PLAIN), episodes(1, with_signal=False)
    told = [made.step(batch, version)["observation_loss"] for version in range(8)]
    assert told[-1] < 0.7 * told[0]


def test_observation_weight_zero_computes_no_observation_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObservationLoss, "__init__", lambda *given: pytest.fail("no loss is asked for"))
    monkeypatch.setattr(BatchRows, "with_observed", lambda self: pytest.fail("no token is asked for"))
    assert "observation_loss" not in learner(folder).step(episodes(1), 0)


def test_batch_without_observed_tokens_has_no_observation_loss(folder: Path) -> None:
    """The weights are bit-identical with and without the observation loss, because the batch has no token of the
    environment.
    """
    quiet = episodes(1)
    rows = [
        [build_row(t.sample, t.tokens[:10], t.loss_mask[:10], t.reward) for t in g.trajectories] for g in quiet.groups()
    ]
    found = []
    for weight in (0.0, WEIGHT):
        made = learner(folder, objective={"kind": "grpo", "observation_weight": weight})
        made.step(batch_of(*rows), 0)
        found.append(saved(made))
    assert found[0] == found[1]


# --- paths of a learner ----------------------------------------------------------------------------------------------


def test_observation_loss_is_replayed_bit_for_bit(folder: Path) -> None:
    found = []
    for _ in range(2):
        made = learner(folder, micro_tokens=40, minibatches=2, objective={"kind": "grpo", "observation_weight": WEIGHT})
        for version in range(2):
            made.step(TrajectoryBatch.from_bytes(episodes(version).to_bytes()), version)
        found.append(saved(made))
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "minibatches"), [("grpo", 1), ("decoupled-ppo", 2), ("ppo", 1)])
def test_observation_loss_is_equal_on_one_rank_and_two_ranks(folder: Path, kind: PresetName, minibatches: int) -> None:
    config = TorchTrain(minibatches=minibatches, objective=PartsObjective(kind=kind, observation_weight=WEIGHT))
    [(expected, weights)] = trained(folder, config, 1, episodes)
    first, other = trained(folder, config, 2, episodes)
    for told, one in zip(first[0], expected, strict=True):
        told.pop("rank_imbalance")
        assert told == pytest.approx(one, abs=NEAR, rel=1e-4)
    assert farthest(first[1], weights) < NEAR
    assert farthest(first[1], other[1]) == 0


@pytest.mark.long
def test_observation_loss_is_equal_with_sharded_weights(folder: Path) -> None:
    objective = {"kind": "grpo", "observation_weight": WEIGHT}
    made, one = (
        in_parts(folder, warmup_versions=0, objective=objective),
        learner(folder, objective=objective, learning_rate=1e-4),
    )
    one.load(*saved(made))
    for version in range(3):
        batch = episodes(version, with_signal=version != 1)
        told, expected = made.step(batch, version), one.step(batch, version)
        assert {name: told[name] for name in expected} == pytest.approx(expected, abs=NEAR, rel=1e-4)
    made._others.end()


def test_turn_keys_are_refused_for_single_turn_episodes() -> None:
    why = 'episodes of environment.kind = "single-turn" have one turn; remove the key'
    for key, value in (("observation_weight", 0.05), ("advantage", {"credit": "turn"})):
        tree = {"train": {"objective": {key: value}}}
        with pytest.raises(ValueError, match=rf"train.objective.{key}.*: {why}"):
            RunConfig.model_validate(tree)
        RunConfig.model_validate({**tree, "environment": {"kind": "import", "path": "letters:Echo"}})
