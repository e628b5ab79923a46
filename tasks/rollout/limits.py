"""The numbers and choices that a scheduler works to; `tasks/run/limits.py` builds them from a run's config."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollflow.tasks.rollout.config import FilterConfig


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """What a scheduler works to; see `RolloutConfig` for the meaning of each choice."""

    seed: int
    batches: int  # to form in all, counted from the run's beginning
    groups: int  # N, groups in a batch
    group_size: int  # G, responses to one prompt
    async_ratio: float  # alpha: the largest staleness
    depth: int  # groups running at a time
    attempts: int  # times a failing group is issued
    max_new_tokens: int
    temperature: float
    slots: int | None = None  # requests all engines can run; groups start only into free ones. None: no limit
    mode: Literal["queue", "batch"] = "queue"
    ahead: float | None = None  # batches that generation may run ahead of training; None: alpha
    extra_groups: int = 0
    extra_responses: int = 0
    tail_batching: bool = False
    tail_after: int | None = None  # None: 1 with tail batching, else 3
    at_bound: Literal["drop", "wait"] = "wait"
    order: Literal["finished", "started"] = "finished"
    staleness: Literal["started", "oldest-token"] = "started"
    filter: FilterConfig | None = None
    shares: tuple[float, ...] = (1.0,)  # source of prompts -> its weight in what is trained

    @property
    def lead(self) -> float:
        """Batches that generation may run ahead of training.

        Where nothing is dropped no part of a batch counts that alpha has only for what replaces slower groups.
        """
        ahead = self.async_ratio if self.ahead is None else self.ahead
        return ahead if self.at_bound == "drop" else min(ahead, math.floor(self.async_ratio))

    @property
    def awaited_after(self) -> int:
        """Times a prompt may be left behind before a batch waits for it."""
        return self.tail_after or (1 if self.tail_batching else 3)


def filtered(limits: FilterConfig | None, rewards: Sequence[float]) -> str | None:
    """Why a group of these rewards is not trained on (dynamic sampling, DAPO section 3.2); None if it is."""
    if limits is None:
        return None
    mean = statistics.fmean(rewards)
    if limits.min_mean is not None and mean <= limits.min_mean:
        return f"mean reward at or below {limits.min_mean:g}"
    if limits.max_mean is not None and mean >= limits.max_mean:
        return f"mean reward at or above {limits.max_mean:g}"
    # As batches hold the rewards, so that an audit finds the same: rounding of a verifier's sums is no spread.
    if limits.min_std is not None and statistics.pstdev(array("f", rewards)) <= limits.min_std:
        return f"rewards spread by {limits.min_std:g} or less"
    return None
