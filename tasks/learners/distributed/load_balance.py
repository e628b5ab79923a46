"""Work is dealt to ranks evenly, so that no rank waits long for the one with the most work.

    lengths --> the longest first, each to the rank that has the fewest tokens so far (LPT: Graham 1969)

Every piece goes whole to one rank. The fullest rank has at most one piece more than the mean, and at most
4/3 - 1 / (3 ranks) times the load of an optimal deal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_pieces(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return for each rank the pieces that it gets, in their order; `lengths` in tokens."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the emptiest rank first, the lower rank among equals
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        load, rank = loads[0]
        found[rank].append(piece)
        heapq.heapreplace(loads, (load + lengths[piece], rank))
    return [sorted(pieces) for pieces in found]


def measure_imbalance(loads: Sequence[float]) -> float:
    """Return how far the fullest rank is above the mean, as a share of the mean; 0 if all have the same load."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0
