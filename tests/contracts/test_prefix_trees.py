"""Tests of prefix trees (rows that share the tokens of common prefixes). Their order and layout are compared with plain
definitions, and their gradients with those of separate rows in float64.

The expected values come from running each row alone through the model of transformers, without code of the learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollflow.storage.records import StopReason, Trajectory
from rollflow.tasks.learners.forward.path_attention import use_path_attention
from rollflow.tasks.objectives.packing import micro_batches
from rollflow.tasks.objectives.prefixes.blocks import split_attention
from rollflow.tasks.objectives.prefixes.lines import Sharing, pack_lines
from rollflow.tasks.objectives.prefixes.order import count_shared, order_rows
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of
from tests.contracts.test_token_logprobs import model_of
from tests.support.counts import examples

Rows = list[list[int]]
WAY = Sharing(10**6, by_path=True, dense=4)
FORKS = [
    [3, 4, 5, 6, 7],
    [3, 4, 5, 6, 8, 9],
    [3, 4, 5, 9],
    [3, 4, 5],
    [3, 4, 5, 6, 7],
    [9, 9],
]  # rows that fork, a row that is a prefix of another, and equal rows
LONG = [[3] * 30 + [4] * 9, [3] * 30 + [5] * 12, [3] * 30 + [5] * 6 + [6] * 8, [3] * 20 + [7] * 11]


def row_of(sample: int, tokens: Sequence[int], first: int) -> Trajectory:
    """Build a row whose tokens are sampled from index `first` on."""
    mask = tuple(place >= first for place in range(len(tokens)))
    logprobs, versions = tuple(-0.5 * one for one in mask), tuple(int(one) - 1 for one in mask)
    return Trajectory(sample, 0, tuple(tokens), mask, logprobs, versions, 1.0, "", StopReason.STOP)


def rows_of(groups: Sequence[Rows], first: int = 1) -> BatchRows:
    made = [[row_of(sample, row, first) for sample, row in enumerate(group)] for group in groups]
    return BatchRows.of(batch_of(*made))


def prefixes_of(groups: Sequence[Rows]) -> set[tuple[int, tuple[int, ...]]]:
    """Return the tokens of all prefix trees; each token is given by its group and its path (all tokens from the root to
    it).
    """
    return {
        (number, tuple(row[:end]))
        for number, group in enumerate(groups)
        for row in group
        for end in range(1, 1 + len(row))
    }


ROWS = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=9), min_size=1, max_size=9)
GROUPS = st.lists(ROWS, min_size=1, max_size=3)


@given(GROUPS)
@settings(max_examples=examples(200), deadline=None)
@example([FORKS, FORKS])
def test_ordered_rows_share_every_common_token(groups: list[Rows]) -> None:
    data = rows_of(groups)
    every = range(len(data.rewards))
    order = order_rows(data, every)
    shared = count_shared(data, order)
    assert sorted(order) == list(every)
    assert int((data.lengths[order] - shared).sum()) == len(prefixes_of(groups))
    texts = [(int(data.groups[row]), data.tokens[data.offsets[row] : data.offsets[row + 1]].tolist()) for row in order]
    for ((one, first), (other, second)), count in zip(pairwise(texts), shared[1:], strict=True):
        alike = [a == b for a, b in zip(first, second, strict=False)]
        assert count == ([*alike, False].index(False) if one == other else 0)


def test_longest_branch_of_a_prefix_tree_comes_first() -> None:
    data = rows_of([[[3, 4], [3, 5, 5], [3, 4, 6, 7], [3, 4, 6], [3]]])
    assert order_rows(data, range(5)) == [2, 3, 0, 1, 4]
    assert pack_lines(data, range(5), 100, WAY)[0].shared == (0, 3, 2, 1, 1)


def test_rows_in_a_long_chain_of_prefixes_are_ordered() -> None:
    """Each row of an agent may extend its row of the previous turn. There may be more such rows than Python's recursion
    limit.
    """
    rows = [[3] * length for length in range(1, 1500)]
    assert order_rows(rows_of([rows]), range(1499)) == list(range(1498, -1, -1))


@given(GROUPS, st.sampled_from([1, 6, 15, 1000]), st.sampled_from([1, 4, 64]))
@settings(max_examples=examples(200), deadline=None)
@example([FORKS], 1000, 1)
def test_blocks_let_each_token_attend_to_its_path(groups: list[Rows], most: int, dense: int) -> None:
    """The blocks of the attention mask contain each pair of a token and an earlier token of its path exactly once, and
    no other pair.
    """
    data = rows_of(groups)
    seen = set()
    for micro in micro_batches(data, range(len(data.rewards)), most, replace(WAY, dense=dense)):
        assert micro.packing is not None
        assert micro.seen is not None
        assert micro.positions is not None
        pairs = torch.zeros(micro.tokens.shape[1], micro.tokens.shape[1], dtype=torch.int64)
        blocks = split_attention(micro.packing, dense, torch.float32)
        for begin, end in blocks.causal:
            pairs[begin:end, begin:end] += torch.ones(end - begin, end - begin, dtype=torch.int64).tril()
        for (begin, end), (first, last) in blocks.paths:
            pairs[begin:end, first:last] += 1
        for trees in blocks.padded:
            for places, mask in zip(trees.places_N.unflatten(0, (trees.count, -1)), trees.mask[:, 0], strict=True):
                real = torch.cat([torch.tensor([True]), places[1:] != places[0]])
                pairs[places[real][:, None], places[real][None]] += (mask == 0)[real][:, real].long()
        assert torch.equal(pairs, micro.seen[0, 0].long())
        assert torch.equal(micro.positions[0], pairs.sum(1) - 1)
        for row, place, target in zip(
            micro.row_M.tolist(), micro.where[1].tolist(), micro.targets.tolist(), strict=True
        ):
            path = micro.tokens[0][pairs[place] > 0].tolist()
            seen.add((row, *path, target))
        assert micro.tokens.shape[1] <= most or len(set(micro.row_M.tolist())) <= 1 or len(data.lengths) == 1
    texts = [data.tokens[begin:end].tolist() for begin, end in pairwise(data.offsets)]
    assert seen == {(row, *text[: end + 1]) for row, text in enumerate(texts) for end in range(1, len(text))}


def test_split_prefix_tree_repeats_only_the_shared_path() -> None:
    data = rows_of([[[3, 4, 5, number, 7] for number in range(10, 16)]])
    sizes = [micro.tokens.shape[1] for micro in micro_batches(data, range(6), 9, WAY)]
    assert sizes == [9, 9]  # 3 shared tokens, and 2 tokens of each of 3 rows
    assert [micro.tokens.shape[1] for micro in micro_batches(data, range(6), 15, WAY)] == [15]


# --- gradients of prefix trees ---------------------------------------------------------------------------------------


@cache
def policy(name: str) -> Any:
    return model_of(name).double().eval()


def logp_of(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    logp = torch.log_softmax(model.get_output_embeddings()(hidden), -1)
    return logp.gather(-1, targets[:, None])[:, 0]


def alone(model: Any, data: BatchRows, weights_B: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted sum of log-probs, computed row by row, and the gradients of this sum."""
    total, model.config._attn_implementation = torch.zeros((), dtype=torch.float64), "sdpa"
    for row, (begin, end) in enumerate(pairwise(data.offsets)):
        tokens = torch.from_numpy(data.tokens[begin:end].astype(np.int64))
        hidden = model.get_decoder()(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
        mine = slice(data.starts[row], data.starts[row + 1])
        places = torch.from_numpy(data.chosen[mine] - begin - 1)
        total = total + (logp_of(model, hidden, tokens[1:])[places] * weights_B[mine]).sum()
    return total.detach(), grads_of(model, total)


def together(model: Any, data: BatchRows, weights_B: Tensor, most: int, way: Sharing) -> tuple[Tensor, list[Tensor]]:
    model.config._attn_implementation = "sdpa"
    assert use_path_attention(model)
    total = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches(data, range(len(data.rewards)), most, way):
        inputs = micro.inputs(torch.device("cpu"), torch.float64)
        hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state[micro.where]
        total = total + (logp_of(model, hidden, micro.targets) * weights_B[micro.among]).sum()
    return total.detach(), grads_of(model, total)


def grads_of(model: Any, total: Tensor) -> list[Tensor]:
    given = list(model.parameters())
    if not total.requires_grad:
        return [torch.zeros_like(one) for one in given]
    found = torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)
    return list(found)


WAYS = st.sampled_from(
    [replace(WAY, dense=dense) for dense in (1, 4, 64)] + [Sharing(10**6), Sharing(10**6, prefixes=False)]
)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi"])  # these models compute in float64 throughout
@settings(max_examples=examples(40), deadline=None)
@given(groups=GROUPS, first=st.integers(0, 4), most=st.sampled_from([7, 20, 1000]), way=WAYS)
@example([FORKS, FORKS], 1, 1000, WAY)
@example([FORKS], 1, 8, WAY)
@example([LONG], 10, 1000, WAY)
@example([LONG], 1, 64, replace(WAY, dense=16))
def test_prefix_trees_give_the_gradients_of_separate_rows(
    name: str, groups: list[Rows], first: int, most: int, way: Sharing
) -> None:
    model, data = policy(name), rows_of(groups, first)
    weights_B = torch.linspace(-1.0, 2.0, len(data.chosen), dtype=torch.float64)
    (loss, grads), (expected, exact) = together(model, data, weights_B, most, way), alone(model, data, weights_B)
    assert abs(float(loss - expected)) <= 1e-10 * max(1.0, abs(float(expected)))
    for grad, plain in zip(grads, exact, strict=True):
        assert float((grad - plain).abs().max()) <= 1e-10 * max(1.0, float(plain.abs().max()))
