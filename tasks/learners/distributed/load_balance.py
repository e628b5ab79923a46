"""Divides sequences evenly among ranks by number of tokens, so that no rank waits long for another rank.

    pieces --> the longest piece first, each piece to the rank that has the fewest tokens so far (LPT: Graham 1969)

The largest load of a rank exceeds the mean load by at most one piece (sequence). The largest load is at most 4/3 - 1 /
(3 ranks) times the largest load of an optimal division.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_pieces(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide pieces of work among ranks; return the indices of the pieces of each rank, in ascending order. `lengths`
    has the number of tokens of each piece of work."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    # heap of loads, whose first entry is the rank with the smallest load
    loads = [(0, rank) for rank in range(ranks)]
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        load, rank = loads[0]
        found[rank].append(piece)
        heapq.heapreplace(loads, (load + lengths[piece], rank))
    return [sorted(pieces) for pieces in found]


def measure_imbalance(loads: Sequence[float]) -> float:
    """Return how much the largest load of a rank exceeds the mean load, as a share of the mean load."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0
