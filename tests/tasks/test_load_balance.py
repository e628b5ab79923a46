"""Compares the division of micro-batches among ranks with an optimal division."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.tasks.learners.distributed.load_balance import deal_pieces, measure_imbalance

RANKS = st.integers(1, 6)


def loads(lengths: list[int], dealt: list[list[int]]) -> list[int]:
    return [sum(lengths[piece] for piece in own) for own in dealt]


@given(lengths=st.lists(st.integers(0, 4000), max_size=60), ranks=RANKS)
def test_micro_batches_are_dealt_to_ranks_once_and_evenly(lengths: list[int], ranks: int) -> None:
    dealt = deal_pieces(lengths, ranks)
    assert len(dealt) == ranks
    assert sorted(piece for own in dealt for piece in own) == list(range(len(lengths)))
    assert all(own == sorted(own) for own in dealt)
    assert max(loads(lengths, dealt)) <= sum(lengths) / ranks + (1 - 1 / ranks) * max(lengths, default=0)
    assert deal_pieces(lengths, ranks) == dealt


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=7), ranks=st.integers(1, 3))
def test_rank_with_most_work_is_within_a_third_of_the_optimum(lengths: list[int], ranks: int) -> None:
    def fullest(where: tuple[int, ...]) -> int:
        return max(sum(n for n, rank in zip(lengths, where, strict=True) if rank == one) for one in range(ranks))

    best = min(map(fullest, product(range(ranks), repeat=len(lengths))))
    assert max(loads(lengths, deal_pieces(lengths, ranks))) <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_dealing_of_micro_batches_matches_a_hand_calculation() -> None:
    """The longest piece is assigned first: 7, then 5, then 4 to the rank that has 5. If ranks have equal loads, the
    first of them gets the next piece.
    """
    assert deal_pieces([4, 5, 7], 2) == [[2], [0, 1]]
    assert deal_pieces([3, 3, 3], 2) == [[0, 2], [1]]
    assert deal_pieces([9], 3) == [[0], [], []]


def test_load_imbalance_matches_a_hand_calculation() -> None:
    """The mean load of 7 and 9 is 8."""
    assert measure_imbalance([7, 9]) == pytest.approx(1 / 8)
    assert measure_imbalance([5, 5]) == measure_imbalance([0, 0]) == 0
