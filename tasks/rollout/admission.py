"""Admission: how many prompt groups may be started now, for freshness alone. A pure function of the counts.

Batch b trains version b. Started under version v a group is fresh enough for it if b <= v + alpha. So while the engines
hold v, groups may be started for the batches below v + 1 + alpha that are not formed yet: what is generated is not
wasted, as long as groups end in about the order they started. A group that overtakes pushes a straggler one batch
later; such a straggler is caught when its batch is formed.

Staleness is a whole number, so of a fractional alpha the part behind the point only starts groups that can take the
place of slower ones of the same batch: none where slow ones are waited for (`Plan.lead`). Half a batch ahead, at most
one version old, is alpha = 1 with ahead = 0.5.

Batches are formed in order, but for those that were lost (voided) and are to be formed again: they come first, and that
later ones are formed already takes nothing from them.
"""

from __future__ import annotations

import math
from collections.abc import Collection


def allowance(
    version: int, outstanding: int, *, number: int, missing: Collection[int] = (), groups: int, ahead: float
) -> int:
    """Groups that may start now; below 0 if more are started than there is room for.

    Args:
        version: policy version the engines hold; -1 before the first.
        outstanding: groups that run, or wait for their batch.
        number: of the first batch that was never formed.
        missing: batches below it that are to be formed again.
        groups: N, groups in a batch.
        ahead: alpha, or less: batches that may be started ahead of training; a fraction is that part of a batch.
    """
    if version < 0:
        return 0
    limit = math.floor(groups * (version + 1 + ahead))  # groups of all batches, in the order of batches
    again = sum(min(max(limit - groups * lost, 0), groups) for lost in missing)
    return again + max(limit - groups * number, 0) - outstanding
