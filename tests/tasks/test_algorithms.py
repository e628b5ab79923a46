"""Tests of advantages, aggregation and packing against hand calculations. `contracts/test_objectives.py` tests the
losses.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import EPSILON, TINY, compute_advantages, penalize_overlong, whiten
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.packing import MicroBatch, micro_batches
from rollflow.tasks.objectives.prefixes.lines import Sharing, pack_lines
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of, trajectory

F64 = torch.float64


GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=F64)
COUNTS = torch.tensor([1, 1, 1, 1, 1, 5])  # tokens per row; ten in total


def found_by(
    rewards: Tensor = REWARDS, groups: Tensor = GROUPS, counts: Tensor = COUNTS, **part: object
) -> list[float]:
    config = Advantage.model_validate(part)
    return compute_advantages(config, rewards, groups, counts, longest=10).tolist()


def test_group_advantages_match_a_hand_calculation() -> None:
    # group 0: mean 1/3, sample deviation sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3)
    deviation = math.sqrt(1 / 3) + EPSILON
    expected = [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0.0, 0.0, 0.0]
    assert found_by() == pytest.approx(expected, abs=1e-12)
    assert found_by(scale="none") == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("part", [{}, {"scale": "none"}, {"baseline": "leave-one-out", "scale": "none"}])
def test_branches_of_a_response_do_not_change_its_advantage(part: dict[str, object]) -> None:
    """Group 0 has the rewards 1, 0, 0. The three branches of its first episode get the advantage of this episode."""
    config = Advantage.model_validate(part)
    plain = found_by(REWARDS[:3], GROUPS[:3], COUNTS[:3], **part)
    rewards, tokens = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=F64), torch.ones(6, dtype=torch.int64)
    branches = torch.tensor([False, True, True, True, False, False])
    found = compute_advantages(config, rewards, torch.zeros(6, dtype=torch.int64), tokens, 10, branches).tolist()
    assert found == [plain[0]] * 4 + plain[1:]


def test_leave_one_out_advantages_match_a_hand_calculation() -> None:
    """An advantage is the reward minus the mean of the other rewards: 1 - 0, 0 - 1/2. The advantage of a single
    response is zero.
    """
    expected = [1.0, -0.5, -0.5, 0.0, 0.0, 0.0]
    assert found_by(baseline="leave-one-out", scale="none") == pytest.approx(expected, abs=1e-12)
    alone = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1])
    rewards = torch.tensor([5.0, 2.0, 0.0], dtype=F64)
    assert found_by(rewards, *alone, baseline="leave-one-out", scale="none") == [0.0, 2.0, -2.0]
    deviation = math.sqrt(1 / 3) + EPSILON  # deviation of the rewards 1, 0, 0
    expected = [1 / deviation, -0.5 / deviation, -0.5 / deviation, 0.0, 0.0, 0.0]
    assert found_by(baseline="leave-one-out", scale="group") == pytest.approx(expected, abs=1e-12)


def test_batch_advantages_match_a_hand_calculation() -> None:
    """Eight of ten tokens are in rows with reward 1: mean 0.8, variance (8 x 0.04 + 2 x 0.64) / 9."""
    assert found_by(baseline="batch", scale="none") == pytest.approx([0.2, -0.8, -0.8, 0.2, 0.2, 0.2], abs=1e-12)
    deviation = math.sqrt(1.6 / 9 + TINY)
    expected = [x / deviation for x in (0.2, -0.8, -0.8, 0.2, 0.2, 0.2)]
    assert found_by(baseline="batch", scale="batch") == pytest.approx(expected, abs=1e-12)


def test_positive_and_negative_advantages_have_separate_weights() -> None:
    found = found_by(scale="none", positive_weight=3.0, negative_weight=0.3)
    assert found == pytest.approx([2.0, -0.1, -0.1, 0, 0, 0], abs=1e-12)


def test_advantage_without_a_baseline_equals_the_reward() -> None:
    assert found_by(baseline="none", scale="none") == REWARDS.tolist()


@pytest.mark.parametrize("baseline", ["group", "leave-one-out", "batch"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_rewards_give_advantage_zero(baseline: str, scale: str, dtype: torch.dtype) -> None:
    """The advantages are exactly zero, although the rounded mean of three times 0.1 is not 0.1."""
    rewards = torch.tensor([0.1] * 3 + [0.7] * 3, dtype=dtype)
    if baseline == "batch":
        rewards[:] = 0.1
        scale = "none" if scale == "group" else scale  # this baseline refuses the scale "group"
    counts = torch.tensor([3, 1, 7, 2, 5, 6])
    assert found_by(rewards, GROUPS, counts, baseline=baseline, scale=scale) == [0.0] * 6


def test_overlong_penalty_matches_a_hand_calculation() -> None:
    """At most 10 tokens are allowed. Each of the last 4 tokens costs 0.25."""
    counts = torch.tensor([0, 6, 7, 8, 10, 12])
    assert penalize_overlong(counts, 10, 0.4).tolist() == pytest.approx([0, 0, 0.25, 0.5, 1, 1], abs=1e-12)
    assert penalize_overlong(counts, 10, 0.0).tolist() == [0.0] * 6
    found = found_by(REWARDS, GROUPS, counts, baseline="none", scale="none", overlong=0.4)
    assert found == pytest.approx([1, 0, -0.25, 0.5, 0, 0], abs=1e-12)


def test_group_advantages_do_not_need_adjacent_rows() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0], dtype=F64)
    found = found_by(rewards, torch.tensor([0, 1, 0, 1]), torch.ones(4), scale="none")
    assert found == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token-mean", [0.25, 0.25, 0.25]),
        ("sequence-mean", [0.5, 0.5, 1 / 6]),
        ("sequence-sum", [0.5, 0.5, 0.5]),
        ("constant", [0.05, 0.05, 0.05]),
    ],
)
def test_loss_aggregation_matches_a_hand_calculation(aggregation: str, weights: list[float]) -> None:
    """The rows have 1, 0 and 3 tokens, of at most 10. Averages ignore the row without tokens."""
    assert row_weights(torch.tensor([1, 0, 3]), aggregation, 10).tolist() == pytest.approx(weights, abs=1e-15)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum", "constant"])
def test_minibatch_without_tokens_has_finite_loss_weights(aggregation: str) -> None:
    assert all(math.isfinite(weight) for weight in row_weights(torch.tensor([0, 0]), aggregation, 10).tolist())


def test_packing_pairs_each_sampled_token_with_its_predictor() -> None:
    batch = batch_of([trajectory([5, 6], [7]), trajectory([5, 6], [8, 9, 10], 1)], [trajectory([1], [2, 3])])
    data = BatchRows.of(batch)
    assert data.groups.tolist() == [0, 0, 1]
    assert data.masked_tokens.tolist() == [1, 3, 2]
    [micro] = micro_batches(data, [0, 1, 2], 1000)
    assert micro.row_M.tolist() == [1, 1, 1, 0, 2, 2]  # longest first, then in order
    assert (micro.positions, micro.seen) == (None, None)
    assert pairs_of(micro) == [(1, 6, 8), (1, 8, 9), (1, 9, 10), (0, 6, 7), (2, 1, 2), (2, 2, 3)]
    assert data.behaviour[micro.among].tolist() == pytest.approx([-0.58, -0.59, -0.6, -0.57, -0.52, -0.53])


def pairs_of(micro: MicroBatch) -> list[tuple[int, int, int]]:
    """Return row, token before, and token, for each masked token."""
    before = micro.tokens[micro.where].tolist()
    return list(zip(micro.row_M.tolist(), before, micro.targets.tolist(), strict=True))


def test_packed_responses_share_one_prompt() -> None:
    """[5 6 | 8 9 10 | 7] and [1 | 2 3]: each response attends to its prompt and itself; positions follow the prompt."""
    batch = batch_of([trajectory([5, 6], [7]), trajectory([5, 6], [8, 9, 10], 1)], [trajectory([1], [2, 3])])
    data = BatchRows.of(batch)
    [micro] = micro_batches(data, [0, 1, 2], 1000, Sharing(64, prefixes=False))
    assert micro.tokens.tolist() == [[5, 6, 8, 9, 10, 7], [1, 2, 3, 0, 0, 0]]
    assert pairs_of(micro) == [(1, 6, 8), (1, 8, 9), (1, 9, 10), (0, 6, 7), (2, 1, 2), (2, 2, 3)]
    assert data.behaviour[micro.among].tolist() == pytest.approx([-0.58, -0.59, -0.6, -0.57, -0.52, -0.53])
    assert micro.positions is not None
    assert micro.positions[0].tolist() == [0, 1, 2, 3, 4, 2]
    assert micro.positions[1, :3].tolist() == [0, 1, 2]
    assert micro.seen is not None
    assert ["".join(str(int(x)) for x in row) for row in micro.seen[0, 0]] == [
        "100000",
        "110000",
        "111000",
        "111100",
        "111110",
        "110001",
    ]
    assert micro.seen[1, 0, :3].int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert bool(micro.seen.any(-1).all())  # padding attends to padding, so each token attends to at least one


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.integers(8, 60),
    st.sampled_from(
        [None, Sharing(1), Sharing(64), Sharing(64, prefixes=False), Sharing(10**6, by_path=True, dense=8)]
    ),
)
def test_every_sampled_token_is_packed_once_with_its_context(
    groups: list[tuple[int, list[int]]], most: int, sharing: Sharing | None
) -> None:
    """Packing is correct for any lengths (also for a response without tokens), any budget and any sharing."""
    number = itertools.count(1)
    made = []
    for prompt, lengths in groups:
        head = [next(number) for _ in range(prompt)]
        made.append([trajectory(head, [next(number) for _ in range(n)], i) for i, n in enumerate(lengths)])
    batch = batch_of(*made)
    data = BatchRows.of(batch)
    found = {}
    for micro in micro_batches(data, range(len(batch)), most, sharing):
        lengths_L = (micro.tokens != 0).sum(1)
        assert micro.tokens.numel() <= most or (len(lengths_L) == 1 and len(micro.row_M.unique()) <= 1)
        for line, place, target, row, among in zip(
            *(t.tolist() for t in (*micro.where, micro.targets, micro.row_M, micro.among)), strict=True
        ):
            if micro.seen is None:
                seen = micro.tokens[line, : place + 1].tolist()
            else:
                seen = micro.tokens[line][micro.seen[line, 0, place]].tolist()
                assert micro.positions is not None
                assert micro.positions[line, place] == len(seen) - 1
            start, at = data.offsets[row], data.chosen[among]
            assert (seen, target) == (data.tokens[start:at].tolist(), data.tokens[at])
            assert among not in found
            found[among] = True
    assert found.keys() == set(range(len(data.chosen)))


@pytest.mark.parametrize(("baseline", "scale"), [("none", "group"), ("none", "batch"), ("batch", "group")])
def test_advantage_scale_that_does_not_fit_is_refused(baseline: str, scale: str) -> None:
    """With such a scale, a group of four correct answers would have an advantage of 10,000."""
    with pytest.raises(ValidationError, match=rf'scale = .{scale}.: with the baseline "{baseline}", equal rewards'):
        Advantage.model_validate({"baseline": baseline, "scale": scale})


@pytest.mark.parametrize("key", ["gamma", "gae_lambda"])
def test_critic_keys_are_refused_without_a_critic(key: str) -> None:
    with pytest.raises(ValidationError, match=f"advantage.{key} = 0.5: this key has no effect without a critic"):
        Advantage.model_validate({key: 0.5})
    assert getattr(Advantage.model_validate({key: 0.5, "baseline": "critic", "scale": "none"}), key) == 0.5


def test_whitening_matches_a_hand_calculation() -> None:
    found = whiten(torch.tensor([1.0, 3.0], dtype=F64), torch.ones(2, dtype=F64))
    assert found.tolist() == pytest.approx([-1 / math.sqrt(2 + TINY), 1 / math.sqrt(2 + TINY)], rel=1e-12)


@pytest.mark.parametrize(("baseline", "scale"), [("batch", "none"), ("batch", "batch"), ("none", "whiten")])
def test_baseline_ignores_rows_without_tokens(baseline: str, scale: str) -> None:
    """All rows with tokens have the same reward, so their advantages are exactly zero, although the mean is rounded."""
    part = Advantage.model_validate({"baseline": baseline, "scale": scale})
    rewards_R, tokens_R = torch.tensor([0.9, 0.9, 0.0, 0.9]), torch.tensor([3, 5, 0, 4])
    found_R = compute_advantages(part, rewards_R, torch.tensor([0, 0, 1, 1]), tokens_R, 8)
    assert found_R[tokens_R > 0].tolist() == [0.0, 0.0, 0.0]


def test_overlong_penalty_begins_above_its_threshold() -> None:
    tokens_R = torch.tensor([44, 45, 46])
    assert penalize_overlong(tokens_R, 100, 0.55).tolist() == pytest.approx([0.0, 0.0, 1 / 55], abs=1e-12)
    assert penalize_overlong(tokens_R, 100, 0.55)[1] == 0.0


def test_whitening_equal_advantages_gives_zero() -> None:
    equal = torch.full((3,), 0.1, dtype=F64)
    assert float(equal.sum() / 3) != 0.1
    assert whiten(equal, torch.ones(3, dtype=F64)).tolist() == [0.0, 0.0, 0.0]
    assert whiten(equal[:0], equal[:0]).tolist() == []


def test_loss_weight_of_a_single_token_is_one() -> None:
    for aggregation in ("token-mean", "sequence-mean", "sequence-sum"):
        assert row_weights(torch.tensor([1, 0]), aggregation, longest=10)[0] == 1.0


def test_response_joins_a_packed_row_only_if_that_saves_work() -> None:
    """If long responses shared the row of a prompt with one token, attention between them would be wasted work."""
    short, long = [trajectory([1] * 50, [2] * 3, i) for i in range(4)], [trajectory([1], [2] * 50, i) for i in range(4)]
    data = BatchRows.of(batch_of(short, long))
    lines = pack_lines(data, range(8), 1000, Sharing(2, prefixes=False))
    assert [line.rows for line in lines] == [(0, 1, 2, 3), (4,), (5,), (6,), (7,)]
    assert [line.length for line in lines] == [62, 51, 51, 51, 51]
    assert [line.rows for line in pack_lines(data, range(4), 57, Sharing(2, prefixes=False))] == [
        (0, 1),
        (2, 3),
    ]  # a line has at most 57 tokens


def test_micro_batches_contain_all_rows_within_the_token_limit() -> None:
    batch = batch_of(*[[trajectory([1] * n, [2] * (n % 4 + 1))] for n in range(1, 30)])
    data = BatchRows.of(batch)
    found = list(micro_batches(data, range(29), 64))
    assert sorted({r for m in found for r in m.row_M.tolist()}) == list(range(29))
    assert all(m.tokens.numel() <= 64 for m in found)
