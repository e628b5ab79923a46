"""How work is dealt to ranks: none waits long for the one that has the most.

    lengths --> the longest first, each to the rank that has the fewest tokens so far (LPT: Graham 1969)

Every piece goes to one rank, whole. The fullest rank has at most the mean and one piece more, and at most
4/3 - 1 / (3 ranks) of what the best deal would give it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank, which of the pieces it has, in their order; `lengths` in tokens."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the emptiest first, of equals the first rank
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        load, rank = loads[0]
        found[rank].append(piece)
        heapq.heapreplace(loads, (load + lengths[piece], rank))
    return [sorted(pieces) for pieces in found]


def imbalance(loads: Sequence[float]) -> float:
    """What the fullest rank has above the mean, as a share of the mean; 0 where all have the same."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0
