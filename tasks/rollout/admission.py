"""Admission: how many prompt groups may be started now. Pure functions of what there is at one moment (`Supply`).

Batch b trains version b. Started under version v a group is fresh enough for it if b <= v + alpha. So while the engines
hold v, groups may be started for the batches below v + 1 + alpha that are not formed yet: what is generated is not
wasted, as long as groups end in about the order they started. A group that overtakes pushes a straggler one batch
later; such a straggler is caught when its batch is formed.

Staleness is a whole number, so of a fractional alpha the part behind the point only starts groups that can take the
place of slower ones of the same batch: none where slow ones are waited for (`RolloutLimits.lead`). Half a batch ahead,
at most one version old, is alpha = 1 with ahead = 0.5.

Batches are formed in order, but for those that were lost (voided) and are to be formed again: they come first, and that
later ones are formed already takes nothing from them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from rollflow.tasks.rollout.limits import RolloutLimits


@dataclass(frozen=True, slots=True)
class Due:
    """The batches that are still to be formed: the lost ones first, then new ones up to the last."""

    number: int  # of the first batch that was never formed
    missing: tuple[int, ...]  # batches below it that are to be formed again
    last: int  # one past the run's last batch

    @property
    def count(self) -> int:
        """How many they are."""
        return max(0, self.last - self.number) + len(self.missing)

    @property
    def first(self) -> int:
        """The number of the next batch to form."""
        return self.at(0)

    def at(self, place: int) -> int:
        """The number of the batch that is formed after `place` others."""
        return self.missing[place] if place < len(self.missing) else self.number + place - len(self.missing)

    def after_first(self) -> Due:
        """What is due once the first of them is formed."""
        if self.missing:
            return replace(self, missing=self.missing[1:])
        return replace(self, number=self.number + 1)


@dataclass(frozen=True, slots=True)
class Supply:
    """What admission decides by, at one moment."""

    version: int  # policy version the engines hold; -1 before the first
    due: Due
    running: int  # groups under way, those that were given up among them
    outstanding: int  # groups that may still come into a batch: that run, or wait for it
    generating: int  # responses still to come, of all that run
    slots: float  # requests that may be under way


@dataclass(frozen=True, slots=True)
class Room:
    """What admission says."""

    batch: int  # that the next group is for
    fresh: int  # groups that alpha allows to start now
    wanted: int  # groups that the run can still use
    free: bool  # the engines have room for one more

    @property
    def opens(self) -> bool:
        """Whether one more group starts."""
        return self.free and min(self.fresh, self.wanted) > 0

    @property
    def is_held(self) -> bool:
        """Whether alpha alone keeps the engines waiting."""
        return self.free and self.fresh <= 0 < self.wanted


def next_batch(supply: Supply, limits: RolloutLimits) -> int:
    """The batch that the next group would be for, as far as alpha reaches."""
    under_way = supply.outstanding // limits.groups  # batches that what is under way may fill
    return min(supply.due.at(under_way), math.floor(supply.version + limits.lead))


def room(supply: Supply, limits: RolloutLimits, extra: int) -> Room:
    """How many groups may start; `extra`: groups that the next batch's round has to spare."""
    due, version = supply.due, supply.version
    fresh = allowance(
        version, supply.outstanding, number=due.number, missing=due.missing, groups=limits.groups, ahead=limits.lead
    )
    if due.first > version + limits.lead:  # this version's batches are formed: an extra group would be too late
        extra = 0
    if due.first > version + limits.async_ratio:  # and so would be any that is started now
        fresh = min(fresh, 0)
    return Room(
        batch=next_batch(supply, limits),
        fresh=fresh + extra if version >= 0 else 0,
        wanted=due.count * limits.groups + extra - supply.outstanding if version >= 0 else 0,
        free=supply.running < limits.depth and supply.generating < supply.slots,
    )


def allowance(
    version: int, outstanding: int, *, number: int, missing: Collection[int] = (), groups: int, ahead: float
) -> int:
    """Groups that may start for freshness alone; below 0 if more are started than there is room for.

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
