"""Admission: decides by pure functions of the present state, `AdmissionInputs`, how many prompt groups may start now.

Batch b trains version b. A group that started under version v is fresh enough for batch b if b <= v + alpha. While the
engines serve version v, groups may start for the unformed batches below v + 1 + alpha. No generated token is wasted, as
long as groups end in about the order in which they started. A group that overtakes a slow group pushes the slow group
into the next batch; `formation` decides whether the batch waits for the slow group.

Staleness is a whole number. The fractional part of alpha only starts groups that can replace slower groups of the same
batch. The fractional part starts no group if batches wait for slow groups (`RolloutLimits.lead`). To run half a batch
ahead with groups that are at most one version old, set alpha = 1 and ahead = 0.5.

Batches are formed in order, except that voided batches, which have to be formed again, come first. Later batches that
exist already do not reduce the number of groups that may start for a voided batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from rollflow.tasks.rollout.limits import RolloutLimits


@dataclass(frozen=True, slots=True)
class BatchesToForm:
    """The batches that are still to be formed: voided ones first, then new ones up to the last."""

    number: int  # number of the first batch that was never formed
    missing: tuple[int, ...]  # numbers of the lower batches that are to be formed again
    last: int  # the number of the run's last batch plus one

    @property
    def count(self) -> int:
        """Number of batches that are still to be formed."""
        return max(0, self.last - self.number) + len(self.missing)

    @property
    def first(self) -> int:
        """The number of the next batch to form."""
        return self.at(0)

    def at(self, place: int) -> int:
        """Return the number of the batch that is formed after `place` other batches."""
        return self.missing[place] if place < len(self.missing) else self.number + place - len(self.missing)

    def after_first(self) -> BatchesToForm:
        """Return the batches that are still to be formed once the first of these batches is formed."""
        if self.missing:
            return replace(self, missing=self.missing[1:])
        return replace(self, number=self.number + 1)


@dataclass(frozen=True, slots=True)
class AdmissionInputs:
    """The state on which the decision of admission depends."""

    version: int  # policy version that the engines serve; -1 before the first update
    due: BatchesToForm
    running: int  # running groups, including preempted ones
    outstanding: int  # groups that may still join a batch: running groups and groups in the buffer
    generating: int  # unfinished responses of all running groups
    slots: float  # most requests that may be in flight


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The decision of admission."""

    batch: int  # number of the batch for which the next group starts
    fresh: int  # groups that alpha allows to start now
    wanted: int  # groups that the run can still use
    free: bool  # True if the engines have room for one more group

    @property
    def opens(self) -> bool:
        """True if one more group may start."""
        return self.free and min(self.fresh, self.wanted) > 0

    @property
    def is_held(self) -> bool:
        """True if engines have free slots and only alpha lets no group start."""
        return self.free and self.fresh <= 0 < self.wanted


def next_batch(supply: AdmissionInputs, limits: RolloutLimits) -> int:
    """Return the number of the batch for which the next group starts, up to the last batch that alpha allows."""
    under_way = supply.outstanding // limits.groups  # batches that the outstanding groups may fill
    return min(supply.due.at(under_way), math.floor(supply.version + limits.lead))


def decide_admission(supply: AdmissionInputs, limits: RolloutLimits, extra: int) -> AdmissionDecision:
    """Decide how many groups may start; `extra` is the number of extra groups in the next batch's round."""
    due, version = supply.due, supply.version
    fresh = compute_allowance(
        version, supply.outstanding, number=due.number, missing=due.missing, groups=limits.groups, ahead=limits.lead
    )
    if due.first > version + limits.lead:  # an extra group would come too late
        extra = 0
    if due.first > version + limits.async_ratio:  # any group that starts now would come too late
        fresh = min(fresh, 0)
    return AdmissionDecision(
        batch=next_batch(supply, limits),
        fresh=fresh + extra if version >= 0 else 0,
        wanted=due.count * limits.groups + extra - supply.outstanding if version >= 0 else 0,
        free=supply.running < limits.max_inflight_groups and supply.generating < supply.slots,
    )


def compute_allowance(
    version: int, outstanding: int, *, number: int, missing: Collection[int] = (), groups: int, ahead: float
) -> int:
    """Compute how many groups may start for freshness alone; negative if too many have started.

    Args:
        version: policy version that the engines serve; -1 before the first update.
        outstanding: number of groups that run or wait for their batch.
        number: number of the first batch that was never formed.
        missing: lower-numbered batches that have to be formed again.
        groups: N, groups in a batch.
        ahead: number of batches that may start ahead of training, at most alpha; it may have a fractional part.
    """
    if version < 0:
        return 0
    limit = math.floor(groups * (version + 1 + ahead))  # groups of all batches that may have started by now
    again = sum(min(max(limit - groups * lost, 0), groups) for lost in missing)
    return again + max(limit - groups * number, 0) - outstanding
