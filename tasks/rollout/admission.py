"""Admission: how many prompt groups may be started now. A pure function of the counts.

Batch b trains version b. The k-th group of a run (counting those already batched) will be trained in batch
k // N. Started under version v it is fresh enough if k // N <= v + alpha, so at most N (v + 1 + alpha) groups
may have been started in all while the engines hold v: what is generated is not wasted, as long as groups end
in about the order they started. A group that overtakes pushes a straggler one batch later; such a straggler is
caught when its batch is formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """What admission looks at."""

    version: int  # policy version the engines hold; -1 before the first
    batched: int  # groups in committed batches
    outstanding: int  # groups started and not batched yet: running or buffered
    running: int  # groups with responses or rewards still to come


def allowance(state: AdmissionState, *, groups: int, async_ratio: float, depth: int, total: int) -> int:
    """Groups that may start now.

    Args:
        groups: N, groups in a batch.
        async_ratio: alpha; a fraction admits that part of a batch ahead.
        depth: most groups running at a time.
        total: groups the whole run trains on; nothing is started beyond what it can use.
    """
    if state.version < 0:
        return 0
    started = state.batched + state.outstanding
    fresh = math.floor(groups * (state.version + 1 + async_ratio)) - started
    return max(0, min(fresh, depth - state.running, total - started))
