"""A hardware file made from what a run recorded: its latencies, lengths, train steps and updates.

- Responses: the measured lengths (thinned to `QUANTILES`), and the correlation of their normal scores within a prompt.
- Engines: what makes a simulation of the run give the recorded times; see `calibrate`. `reading` and `kv_tokens` are
  not fitted: give them by hand where a cache fills.
- Learner: each version's own time, from the batch in hand to the next one asked for, replayed in order.
- Updates: the median pause, and the median time from a version's publishing to its pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.calibrate import Seen, calibrated
from rollflow.tasks.simulation.hardware import (
    Hardware,
    LearnerHardware,
    ResponsesHardware,
    RewardHardware,
    UpdateHardware,
)

QUANTILES = 400  # values that stand for a measured distribution
TRIM = 0.01  # share of the longest generations that does not count: a restart, a stall

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One version of a run. R trajectories were trained into it; seconds are wall-clock."""

    version: int
    seconds: float  # since the version before was published
    waited: float  # of them, the learner waited for the batch
    pause: float | None  # of the engines, to take this version
    fetched: float | None  # from its publishing to the pause
    groups_R: Sequence[int]  # which trajectories share a prompt
    tokens_R: Sequence[int]  # of the responses
    generation_R: Sequence[float]
    reward_R: Sequence[float]


def fitted(versions: Sequence[Recorded], config: RunConfig) -> Hardware:
    """The hardware that these versions (those after a warm-up) ran on. Takes some seconds: it simulates them."""
    tokens = np.concatenate([np.asarray(v.tokens_R, float) for v in versions])
    alone = config.async_ratio == 0
    seconds = np.concatenate([np.asarray(v.generation_R, float) for v in versions])
    rewards = np.concatenate([np.asarray(v.reward_R, float) for v in versions])
    pauses = [v.pause for v in versions if v.pause is not None]
    fetches = [v.fetched for v in versions if v.fetched is not None]
    rest = Hardware(
        title="as recorded",
        responses=ResponsesHardware(
            lengths=tuple(int(length) for length in thinned(tokens)), correlation=correlation_of(versions), grain=1
        ),
        reward=RewardHardware(measured=tuple(round(float(x), 6) for x in thinned(rewards))),
        learner=LearnerHardware(measured=tuple(round(x, 6) for x in train_seconds(versions, alone=alone))),
        update=UpdateHardware(
            seconds=round(median(pauses), 6) if pauses else 0.0,
            fetch_seconds=round(max(0.0, median(fetches)), 6) if fetches else 0.0,
        ),
    )
    kept = seconds <= np.quantile(seconds, 1.0 - TRIM)
    rollout = median(v.waited if alone else v.seconds for v in versions)
    return calibrated(Seen(tokens[kept], seconds[kept], rollout), config, rest)


def thinned(values: Floats) -> Floats:
    """At most `QUANTILES` values with the same distribution, from the middle of equal shares."""
    values = np.sort(values)
    if len(values) <= QUANTILES:
        return values
    found: Floats = values[((np.arange(QUANTILES) + 0.5) / QUANTILES * len(values)).astype(int)]
    return found


def train_seconds(versions: Sequence[Recorded], *, alone: bool) -> list[float]:
    """What the learner itself took. The shortest wait of all is that for a batch that lay ready, so it counts as the
    learner's own time. At alpha = 0 (`alone`) no batch ever lies ready."""
    ready = 0.0 if alone else min(v.waited for v in versions)
    return [max(1e-6, v.seconds - (v.waited - ready)) for v in versions]


def correlation_of(versions: Sequence[Recorded]) -> float:
    """rho of the normal scores of lengths within a prompt, by the variance between and within groups."""
    tokens = np.concatenate([np.asarray(v.tokens_R, float) for v in versions])
    groups: Floats = np.concatenate([_numbered(v.groups_R) + 1e6 * i for i, v in enumerate(versions)])
    scores = normal_scores(tokens)
    _, index = np.unique(groups, return_inverse=True)
    sizes = np.bincount(index)
    means = np.bincount(index, scores) / sizes
    within = float(((scores - means[index]) ** 2).sum() / max(1, len(scores) - len(sizes)))
    total = float(scores.var())
    return min(1.0, max(0.0, 1.0 - within / total)) if total > 0 else 0.0


def normal_scores(values: Floats) -> Floats:
    """Each value's rank as a standard normal number; equal values share one."""
    distinct, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(values)
    normal = NormalDist()
    table = np.array([normal.inv_cdf(float(share)) for share in middles])
    assert len(table) == len(distinct)
    found: Floats = table[index]
    return found


def _numbered(groups: Sequence[int]) -> Floats:
    return np.unique(np.asarray(groups), return_inverse=True)[1].astype(float)
