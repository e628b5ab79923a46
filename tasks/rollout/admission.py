"""Admission: decides how many groups of responses may start now, by pure functions of `AdmissionInputs`.

Training on batch b starts from policy version b. A group of responses that started under policy version v may be
trained in batch b if b <= v + alpha, where alpha is the largest allowed staleness (`async_ratio`). While the engines
serve policy version v, groups of responses start only for batches with numbers below v + 1 + alpha.

While `max_unscored` responses wait for a score, no new group of responses starts, so slow scoring slows generation
down. Running groups of responses continue, so the number of waiting responses can exceed `max_unscored`.

Voided (rejected) batches are formed again before new batches are formed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from rollflow.tasks.rollout.limits import RolloutLimits


@dataclass(frozen=True, slots=True)
class BatchesToForm:
    """The training batches that still have to be formed: first the voided (rejected) batches, then new batches."""

    number: int  # number of the first training batch that was never formed
    missing: tuple[int, ...]  # numbers of the voided (rejected) training batches that have to be formed again
    last: int  # number of the run's last training batch plus one

    @property
    def count(self) -> int:
        """Number of training batches that still have to be formed."""
        return max(0, self.last - self.number) + len(self.missing)

    @property
    def first(self) -> int:
        """The number of the next training batch to form."""
        return self.at(0)

    def at(self, place: int) -> int:
        """Return the number of the training batch that is formed after `place` earlier batches."""
        return self.missing[place] if place < len(self.missing) else self.number + place - len(self.missing)

    def after_first(self) -> BatchesToForm:
        """Return the training batches that are left to form after the next batch."""
        if self.missing:
            return replace(self, missing=self.missing[1:])
        return replace(self, number=self.number + 1)


@dataclass(frozen=True, slots=True)
class AdmissionInputs:
    """The state of the rollout from which admission decides whether another group of responses may start."""

    version: int  # policy version that the engines serve; -1 before the first update
    due: BatchesToForm
    running: int  # number of running groups of responses, including preempted groups
    outstanding: int  # number of groups of responses that may still join a batch: running or buffered groups
    generating: int  # number of unfinished responses of all running groups of responses
    slots: float  # largest number of generation requests that may be in flight
    unscored: int = 0  # number of responses that wait for a score


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Admission's decision whether another group of responses may start."""

    batch: int  # number of the training batch for which the next group of responses starts
    fresh: int  # number of groups of responses that `async_ratio` allows to start now
    wanted: int  # number of groups of responses that the run still needs
    free: bool  # True if the engines have room for one more group of responses
    scores: bool = True  # True if the queue of unscored responses is not full

    @property
    def opens(self) -> bool:
        """True if one more group of responses may start."""
        return self.free and self.scores and min(self.fresh, self.wanted) > 0

    @property
    def is_held(self) -> bool:
        """True if engines have free slots and only the staleness limit keeps a new group from starting."""
        return self.free and self.scores and self.fresh <= 0 < self.wanted

    @property
    def is_backlogged(self) -> bool:
        """True if engines have free slots and only the queue of unscored responses keeps a new group from starting."""
        return self.free and not self.scores and min(self.fresh, self.wanted) > 0


def next_batch(supply: AdmissionInputs, limits: RolloutLimits) -> int:
    """Return the number of the training batch for which the next group of responses is generated."""
    # number of whole batches that the outstanding groups of responses fill
    under_way = supply.outstanding // limits.groups
    return min(supply.due.at(under_way), math.floor(supply.version + limits.lead))


def decide_admission(supply: AdmissionInputs, limits: RolloutLimits, extra: int) -> AdmissionDecision:
    """Decide how many groups of responses may start, including `extra` groups beyond the need of the next batch."""
    due, version = supply.due, supply.version
    fresh = compute_allowance(
        version, supply.outstanding, number=due.number, missing=due.missing, groups=limits.groups, ahead=limits.lead
    )
    if due.first > version + limits.lead:  # generation is as far ahead of training as it may be
        extra = 0
    # If the next batch needs a newer policy version, a group of responses that starts now would be too old.
    if due.first > version + limits.async_ratio:
        fresh = min(fresh, 0)
    return AdmissionDecision(
        batch=next_batch(supply, limits),
        fresh=fresh + extra if version >= 0 else 0,
        wanted=due.count * limits.groups + extra - supply.outstanding if version >= 0 else 0,
        free=supply.running < limits.max_inflight_groups and supply.generating < supply.slots,
        scores=limits.max_unscored is None or supply.unscored < limits.max_unscored,
    )


def compute_allowance(
    version: int, outstanding: int, *, number: int, missing: Collection[int] = (), groups: int, ahead: float
) -> int:
    """Compute how many more groups of responses may start without becoming too old for training.

    Args:
        version: policy version that the engines serve; -1 before the first update.
        outstanding: number of groups of responses that are running or wait for a batch.
        number: number of the first training batch that was never formed.
        missing: numbers of the voided (rejected) batches that have to be formed again.
        groups: number of groups of responses in a training batch.
        ahead: number of batches by which generation may run ahead of training; a fraction is allowed.
    """
    if version < 0:
        return 0
    # number of groups of responses that may have started by now, counted from the first batch
    limit = math.floor(groups * (version + 1 + ahead))
    again = sum(min(max(limit - groups * lost, 0), groups) for lost in missing)
    return again + max(limit - groups * number, 0) - outstanding
