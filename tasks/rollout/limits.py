"""Defines the limits of the rollout scheduler, which the module `tasks/run/limits.py` builds from a run's config."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollflow.storage.records import LEAST_JUDGED
from rollflow.tasks.rollout.config import FilterConfig


@dataclass(frozen=True, slots=True)
class JudgingLimits:
    """Limits on retries and failures while the judge of a scorer is unavailable."""

    tries: int = 0  # number of tries to judge a response; if 0, an unjudged response is trained on with reward 0
    # number of consecutive groups of responses that the scorer could not judge, after which the run fails
    max_unjudged: int = 20
    compares_group: bool = False  # True if the scorer compares a response with the other responses to the same prompt
    leaves_out: bool = False  # True if a response that nobody could judge is left out of its group


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """The limits of the rollout scheduler; `RolloutConfig` describes the config keys of most limits."""

    seed: int
    batches: int  # number of training batches in the whole run
    groups: int  # N, groups in a batch
    group_size: int  # G, responses to one prompt
    async_ratio: float  # alpha: the largest staleness
    max_inflight_groups: int  # largest number of groups of responses that run at the same time
    attempts: int  # number of failures of one generation request after which the run fails
    max_new_tokens: int
    temperature: float
    # a new group of responses starts only below this number of unfinished responses; None: no limit
    slots: int | None = None
    # a new group of responses starts only below this number of unscored responses; None: no limit
    max_unscored: int | None = None
    # number of batches by which generation may lead training; None: `async_ratio`
    max_batches_ahead: float | None = None
    redundant_groups: int = 0
    redundant_responses: int = 0
    tail_batching: bool = False
    # number of preemptions of a prompt after which a batch waits for its responses; None: 1 with tail batching, else 3
    max_preemptions: int | None = None
    on_stale: Literal["drop", "wait"] = "wait"
    batch_order: Literal["finished", "started"] = "finished"
    staleness_from: Literal["started", "oldest-token"] = "started"
    filter: FilterConfig | None = None
    # scorer -> limits of the scorer; the default is `JudgingLimits()`
    judging: Mapping[str, JudgingLimits] = field(default_factory=dict)
    # prompt source -> share of the trained groups of responses that the source should get
    shares: tuple[float, ...] = (1.0,)

    def judging_of(self, scorer: str) -> JudgingLimits:
        """Return the limits of the scorer with this name."""
        return self.judging.get(scorer, JudgingLimits())

    def judge_tries(self, scorer: str) -> int:
        """Return the largest number of times that the scorer with this name tries to judge a response."""
        return self.judging_of(scorer).tries

    @property
    def least_judged(self) -> int:
        """Smallest number of judged responses that a group must have; a group with fewer judged responses is
        given up."""
        return min(LEAST_JUDGED, self.group_size)

    @property
    def lead(self) -> float:
        """Number of training batches by which generation may run ahead of training.

        With `on_stale = "wait"`, `async_ratio` is rounded down: the groups that its fractional part adds only replace
        slower groups.
        """
        ahead = self.async_ratio if self.max_batches_ahead is None else self.max_batches_ahead
        return ahead if self.on_stale == "drop" else min(ahead, math.floor(self.async_ratio))

    @property
    def awaited_after(self) -> int:
        """Number of preemptions of a prompt after which a batch waits for its responses."""
        return self.max_preemptions or (1 if self.tail_batching else 3)


def filter_reason(limits: FilterConfig | None, rewards: Sequence[float]) -> str | None:
    """Return why a group of responses is filtered (dynamic sampling, DAPO section 3.2); None if it is kept."""
    if limits is None:
        return None
    # Batches store rewards as float32. The decision uses float32 rewards and limits, so that an audit can repeat it.
    stored = array("f", rewards)
    mean = _round_to_float32(statistics.fmean(stored))
    if limits.min_mean is not None and mean <= _round_to_float32(limits.min_mean):
        return f"mean reward at or below {limits.min_mean:g}"
    if limits.max_mean is not None and mean >= _round_to_float32(limits.max_mean):
        return f"mean reward at or above {limits.max_mean:g}"
    if limits.min_std is not None and statistics.pstdev(stored) <= limits.min_std:
        return f"rewards spread by {limits.min_std:g} or less"
    return None


def _round_to_float32(number: float) -> float:
    return array("f", [number])[0]
