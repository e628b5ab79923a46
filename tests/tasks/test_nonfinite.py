"""Tests that no weight changes because of a NaN or an infinity, wherever it comes from, and that every weight is
checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import NotFinite
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.testing.learners import batch_of, saved, trajectory
from tests.contracts.test_token_logprobs import learner_of, model_of, tokens_of


def two_groups() -> TrajectoryBatch:
    def group(seed: int) -> list[object]:
        prompt = tokens_of(4, seed)
        return [trajectory(prompt, tokens_of(5, seed + i), i, reward=float(i % 2)) for i in range(4)]

    return batch_of(group(10), group(20))  # type: ignore[arg-type]


def with_last(batch: TrajectoryBatch, column: str, value: float) -> TrajectoryBatch:
    """Return the batch with `value` in the last row of a column; if the rows are lists of tokens, at the last token of
    the last row.
    """
    where = batch.table.schema.get_field_index(column)
    field, given = batch.table.schema.field(where), batch.table[column].to_pylist()
    if isinstance(given[-1], list):
        given[-1][-1] = value
    else:
        given[-1] = value
    return replace(batch, table=batch.table.set_column(where, field, pa.array(given, field.type)))


def assert_nothing_changes(made: TorchLearner, batch: TrajectoryBatch, why: str) -> None:
    """Check that a train step on `batch` raises `NotFinite` with the message `why`, and leaves weights and state
    unchanged.
    """
    made.step(two_groups(), 4)
    before = saved(made)
    with pytest.raises(NotFinite, match=why) as caught:
        made.step(batch, 5)
    assert len(str(caught.value).splitlines()) == 1
    assert saved(made) == before
    assert made.first_nonfinite() is None


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(("column", "name"), [("logprobs", "a log-prob"), ("reward", "a reward")])
def test_nonfinite_batch_changes_no_weight(column: str, name: str, value: float, minibatches: int) -> None:
    """A batch with a NaN or an infinity changes nothing, even if its first minibatch is valid."""
    made = learner_of(model_of("llama"), minibatches=minibatches)
    why = f"^version 6 is not trained, because {name} of batch 5 is {value}; fix the "
    assert_nothing_changes(made, with_last(two_groups(), column, value), why)


@pytest.mark.parametrize("kind", PRESETS)
def test_nonfinite_log_prob_changes_no_weight_under_any_preset(kind: str) -> None:
    credit = {"advantage": {"credit": "turn"}} if kind == "gigpo" else {}  # the batch has no states of turns
    made = learner_of(model_of("llama"), objective={"kind": kind} | credit)
    assert_nothing_changes(made, with_last(two_groups(), "logprobs", -math.inf), "a log-prob of batch 5 is -inf")


def infinite(logp_M: Tensor) -> Tensor:
    return logp_M / 0.0


def with_no_slope(logp_M: Tensor) -> Tensor:
    """Return zero, computed so that its derivative is infinity times zero."""
    return (logp_M - logp_M).sqrt()


@pytest.mark.parametrize(("loss", "figure"), [(infinite, "loss"), (with_no_slope, "grad_norm")])
def test_nonfinite_loss_or_gradient_is_not_applied(loss: Callable[[Tensor], Tensor], figure: str) -> None:
    class Broken(Objective):
        def loss(self, tokens: MaskedTokens) -> TokenLoss:
            return TokenLoss(loss(tokens.logp_M), torch.zeros_like(tokens.logp_M, dtype=torch.bool))

    made = learner_of(model_of("llama"))
    made.step(two_groups(), 4)
    before = saved(made)
    made.objective = Broken()
    cure = "start another run from the policy that `rollflow export` writes and a lower train.learning_rate$"
    with pytest.raises(
        NotFinite, match=rf"^version 6 is not trained, because {figure} of batch 5 is -?(nan|inf); {cure}"
    ):
        made.step(two_groups(), 5)
    assert saved(made) == before
    assert made.first_nonfinite() is None


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "gpt2", "opt"])
def test_nonfinite_value_in_any_weight_is_found(name: str, value: float) -> None:
    """In models with separate heads, tied heads and biases, one element of each tensor is made NaN or infinite in
    turn.
    """
    made = learner_of(model_of(name))
    assert made.first_nonfinite() is None
    for parameter_name, parameter in made.model.named_parameters():
        last = parameter.detach().view(-1)[-1:]
        sound = last.clone()
        last.fill_(value)
        assert made.first_nonfinite() == parameter_name
        last.copy_(sound)
    assert made.first_nonfinite() is None
