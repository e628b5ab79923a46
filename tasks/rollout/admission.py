"""Admission: how many prompt groups may be started now, for freshness alone. A pure function of the counts.

Batch b trains version b. The k-th group of a run (counting those already batched) will be trained in batch
k // N. Started under version v it is fresh enough if k // N <= v + alpha, so at most N (v + 1 + alpha) groups
may have been started in all while the engines hold v: what is generated is not wasted, as long as groups end
in about the order they started. A group that overtakes pushes a straggler one batch later; such a straggler is
caught when its batch is formed.

Staleness is a whole number, so of a fractional alpha the part behind the point only starts groups that can take the
place of slower ones of the same batch. Half a batch ahead, at most one version old, is alpha = 1 with ahead = 0.5.
"""

from __future__ import annotations

import math


def allowance(version: int, started: int, *, groups: int, ahead: float) -> int:
    """Groups that may start now; below 0 if more are started than a batch that was lost leaves room for.

    Args:
        version: policy version the engines hold; -1 before the first.
        started: groups in committed batches, running, or waiting for their batch.
        groups: N, groups in a batch.
        ahead: alpha, or less: batches that may be started ahead of training; a fraction is that part of a batch.
    """
    return math.floor(groups * (version + 1 + ahead)) - started if version >= 0 else 0
