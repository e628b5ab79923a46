"""Tests with random rows (trajectories) that rows packed together, with shared tokens, get the same log-probs and
gradients as each row alone.

Rows have any length up to the model's context length. The drawn batches include groups of one row, rows without tokens
of the policy, equal rows, prompts that are prefixes of other prompts, tokens of an environment, and micro-batches that
are shorter than a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollflow.storage.records import StopReason, Trajectory
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.prefixes.lines import Sharing, pack_lines
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of
from tests.contracts.test_token_logprobs import learner_of, model_of
from tests.support.counts import examples

CONTEXT = 64  # context length of the tested models
Piece = tuple[bool, list[int]]  # whether the policy sampled the piece, and the piece's tokens
Row = tuple[int, list[Piece]]  # number of tokens of the group's prompt, and the pieces after them


def row_of(prompt: Sequence[int], row: Row) -> Trajectory:
    """Build a trajectory that has at least one token and fits the context."""
    taken, pieces = row
    made = [(False, token) for token in prompt[: max(1, taken)]]
    made += [(chosen, token) for chosen, tokens in pieces for token in tokens]
    mask, tokens = (tuple(column) for column in zip(*made[:CONTEXT], strict=True))
    quiet = tuple(0.0 if not chosen else -0.5 for chosen in mask)
    return Trajectory(0, 0, tokens, mask, quiet, tuple(0 if c else -1 for c in mask), 1.0, "", StopReason.LENGTH)


TOKENS = st.lists(st.integers(3, 6), max_size=12)  # there are few values, so that some rows are equal by chance
PIECES = st.lists(st.tuples(st.booleans(), TOKENS), max_size=3)
PROMPT = st.lists(st.integers(3, 6), min_size=1, max_size=20)
GROUPS = st.lists(st.tuples(PROMPT, st.lists(st.tuples(st.just(99), PIECES), min_size=1)), min_size=1, max_size=3)
PROMPTS, PATHS = Sharing(10**6, prefixes=False), Sharing(10**6, by_path=True, dense=4)
SHARINGS = st.sampled_from(
    [
        PROMPTS,
        Sharing(1, prefixes=False),
        Sharing(1),
        Sharing(10**6),
        PATHS,
        replace(PATHS, dense=1),
        replace(PATHS, dense=64),
    ]
)
LONG = [(True, [3] * 30)]
SAID = [(True, [4, 5])]


@cache
def learner(name: str) -> TorchLearner:
    return learner_of(model_of(name).double())


def found(made: TorchLearner, data: BatchRows, micro_tokens: int, sharing: Sharing | None) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the B sampled tokens, and the gradient of a weighted sum of these log-probs."""
    made.config = made.config.model_copy(update={"micro_tokens": micro_tokens})
    made.sharing = sharing
    made.model.zero_grad()
    logp_B = torch.zeros(len(data.chosen), dtype=torch.float64)
    for micro in made.micros(data, range(len(data.rewards))):
        logp_M = made.own_logprobs(micro)
        logp_B[micro.among] = logp_M.detach().double()
        (logp_M * (1.0 + micro.among)).sum().backward()
    grads = [
        torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.flatten() for p in made.model.parameters()
    ]
    return logp_B, torch.cat(grads)


@pytest.mark.many
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@settings(max_examples=examples(300), deadline=None)
@given(groups=GROUPS, micro_tokens=st.sampled_from([1, 7, 64, 4096]), sharing=SHARINGS)
# the rows form a long line, two rows are equal, and one has no tokens of the policy
@example([([3, 4, 5], [(99, LONG), (99, LONG), (99, [])])], 4096, PROMPTS)
@example([([3] * 40, [(99, LONG)] * 4)], 4096, PROMPTS)  # each row ends at the last position
@example([([3] * 40, [(99, LONG)] * 4)], 4096, PATHS)
@example([([3, 4, 5], [(99, SAID), (2, SAID), (99, [(False, [4]), *SAID])]), ([3, 4], [(99, SAID)])], 4, PROMPTS)
def test_packed_rows_give_the_gradients_of_single_rows(
    name: str, groups: list[tuple[list[int], list[Row]]], micro_tokens: int, sharing: Sharing
) -> None:
    data = BatchRows.of(batch_of(*([row_of(prompt, row) for row in rows] for prompt, rows in groups)))
    together, alone = (found(learner(name), data, micro_tokens, way) for way in (sharing, None))
    for one, other in zip(together, alone, strict=True):  # models compute norms in float32
        assert float((one - other).norm()) <= 1e-6 * float(other.norm())
    check_lines(data, micro_tokens, sharing)


def check_lines(data: BatchRows, micro_tokens: int, sharing: Sharing) -> None:
    """Check that each row is in exactly one packed line, and that a line of several rows fits a micro-batch and has
    fewer tokens than the rows.
    """
    every = range(len(data.rewards))
    lines = pack_lines(data, every, micro_tokens, sharing)
    assert sorted(row for line in lines for row in line.rows) == list(every)
    for line in lines:
        alone = int(data.lengths[list(line.rows)].sum())
        assert line.length == alone - sum(line.shared)
        assert len(line.rows) == 1 or line.length <= micro_tokens
        assert len({int(data.groups[row]) for row in line.rows}) == 1
        assert line.shared[0] == 0
        for (one, other), shared in zip(pairwise(line.rows), line.shared[1:], strict=True):
            heads = [data.tokens[data.offsets[row] :][:shared] for row in (one, other)]
            assert np.array_equal(*heads)
