"""A learner on its own samples: rewards of tokens teach what the reward of a response does not show."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Branch, StopReason, Trajectory
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.learners.base import no_wait
from rollflow.tasks.learners.forward.pre_update import compute_before
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.learners.updates import Updates
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of, saved
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_learner import learner

PROMPT, LENGTH, GROUP, VERSIONS = [3, 4, 5], 3, 32, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def sample(made: TorchLearner, version: int, draw: torch.Generator, *, with_tokens: bool) -> TrajectoryBatch:
    """Sample a group of responses, all of which have the reward 0; with token rewards, each even token has 1."""
    tokens, logprobs = torch.tensor([PROMPT] * GROUP), list[Tensor]()
    with torch.no_grad():
        for _ in range(LENGTH):
            logp = torch.log_softmax(made.model(input_ids=tokens).logits[:, -1].float(), -1)
            drawn = torch.multinomial(logp.exp(), 1, generator=draw)
            tokens, logprobs = torch.cat([tokens, drawn], 1), [*logprobs, logp.gather(1, drawn)]
    asked, rows = len(PROMPT), []
    for number, (row, own) in enumerate(zip(tokens.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)):
        of_tokens = [math.nan] * asked + [float(token % 2 == 0) for token in row[asked:]]
        values = Float32s.of(of_tokens) if with_tokens else None
        mask, versions = [False] * asked + [True] * LENGTH, [-1] * asked + [version] * LENGTH
        given = [0.0] * asked + own
        rows.append(
            Trajectory(number, version, row, mask, given, versions, 0.0, "", StopReason.STOP, token_rewards=values)
        )
    return batch_of(rows)


def count_even(batch: TrajectoryBatch) -> float:
    """Return the fraction of even tokens in the responses."""
    sampled = [token for row in batch.table["tokens"].to_pylist() for token in row[len(PROMPT) :]]
    return sum(token % 2 == 0 for token in sampled) / len(sampled)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce++", "ppo"])
def test_token_rewards_train_where_response_rewards_are_equal(folder: Path, kind: str) -> None:
    """All responses have the reward 0, from which nothing can be learned."""
    made, draw = learner(folder, learning_rate=3e-3, objective={"kind": kind}), torch.Generator().manual_seed(0)
    before = count_even(sample(made, 0, draw, with_tokens=True))
    for version in range(VERSIONS):
        made.step(sample(made, version, draw, with_tokens=True), version)
    after = count_even(sample(made, VERSIONS, draw, with_tokens=True))
    assert before < 0.65
    assert after > 0.9


def test_equal_rewards_without_token_rewards_change_no_weight(folder: Path) -> None:
    made, draw = learner(folder, learning_rate=3e-3), torch.Generator().manual_seed(0)
    before = made.model.state_dict()["lm_head.weight"].clone()
    made.step(sample(made, 0, draw, with_tokens=False), 0)
    assert torch.equal(made.model.state_dict()["lm_head.weight"], before)


def test_token_rewards_are_trained_again_bit_for_bit(folder: Path) -> None:
    """A stored batch gives the same weights in every run of the step, as a replay needs."""
    found = []
    for _ in range(2):
        made, draw = learner(folder, micro_tokens=24), torch.Generator().manual_seed(0)
        batch = sample(made, 0, draw, with_tokens=True)
        made.step(TrajectoryBatch.from_bytes(batch.to_bytes()), 0)
        found.append(saved(made)[0])
    assert found[0] == found[1]


def test_learner_refuses_token_rewards_it_cannot_use(folder: Path) -> None:
    made, draw = learner(folder, objective={"kind": "gspo"}), torch.Generator().manual_seed(0)
    with pytest.raises(ConfigError, match=r"ratio.level = 'geometric': the scorer gives values to tokens or steps"):
        made.step(sample(made, 0, draw, with_tokens=True), 0)


def test_branches_of_an_episode_share_one_weight_in_the_loss(folder: Path) -> None:
    """With the mean over episodes, the tokens of an episode's two branches weigh as much as one response."""
    made = learner(folder, objective={"kind": "grpo", "aggregation": "sequence-mean"})
    made.begin(0, no_wait)
    [group] = sample(made, 0, torch.Generator().manual_seed(0), with_tokens=False).groups()
    first, second, third, *_ = group.trajectories
    data = BatchRows.of(batch_of([first, replace(second, branch=Branch(first.sample, len(PROMPT))), third]))
    weights = Updates(made, data, compute_before(made, data), 0, no_wait).weights_of([0, 1, 2])
    assert weights.tolist() == pytest.approx([1 / (4 * LENGTH), 1 / (4 * LENGTH), 1 / (2 * LENGTH)])
