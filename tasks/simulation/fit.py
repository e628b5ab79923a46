"""Fits a hardware file, which describes the machines of a simulation, to a recorded run.

- Response lengths are the measured lengths (thinned to `QUANTILES` values), with the measured correlation between the
  responses to one prompt.
- Engine speeds are chosen so that a simulation of the run has the recorded times (see `calibrate`). The KV cache is
  assumed to cost no time.
- The learner repeats its recorded times, from the receipt of each batch to the request for the next.
- Weight updates have the median recorded times, both for the pause and for fetching weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.calibrate import ObservedRollout, calibrate_hardware
from rollflow.tasks.simulation.hardware import (
    Hardware,
    LearnerHardware,
    ResponsesHardware,
    RewardHardware,
    UpdateHardware,
)

QUANTILES = 400  # largest number of values that represent a measured distribution
TRIM = 0.01  # share of the longest generations that are ignored, because they include restarts and stalls

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """The record of one policy version, trained on R trajectories; times are wall-clock seconds."""

    version: int
    seconds: float  # seconds since the previous policy version was published
    waited: float  # seconds that the learner waited for the batch of this policy version
    pause: float | None  # seconds that the engines paused to load this policy version
    fetched: float | None  # seconds from the publishing of this policy version to the engines' pause
    groups_R: Sequence[int]  # for each trajectory, the number of its group of responses to one prompt
    tokens_R: Sequence[int]  # number of tokens of each response
    generation_R: Sequence[float]
    reward_R: Sequence[float]


def fit_hardware(versions: Sequence[RecordedVersion], config: RunConfig, shared_speed: float = 1.0) -> Hardware:
    """Fit the hardware on which the given policy versions were recorded, after a warm-up. The fit simulates these
    policy versions, which takes some seconds.

    With `shared_speed` below 1, engines and learner shared cores (see `learner.shared_speed`), and the seconds of the
    learner are converted to those without working engines. Engines are assumed to work during all train steps if alpha
    is above 0.
    """
    tokens = np.concatenate([np.asarray(v.tokens_R, float) for v in versions])
    alone = config.async_ratio == 0
    seconds = np.concatenate([np.asarray(v.generation_R, float) for v in versions])
    rewards = np.concatenate([np.asarray(v.reward_R, float) for v in versions])
    pauses = [v.pause for v in versions if v.pause is not None]
    fetches = [v.fetched for v in versions if v.fetched is not None]
    rest = Hardware(
        title="as recorded",
        responses=ResponsesHardware(
            lengths=tuple(int(length) for length in thin_values(tokens)),
            correlation=correlation_of(versions),
            tokens_per_tick=1,
        ),
        reward=RewardHardware(measured=tuple(round(float(x), 6) for x in thin_values(rewards))),
        learner=LearnerHardware(
            shared_speed=shared_speed,
            measured=tuple(
                round(x * (1.0 if alone else shared_speed), 6) for x in train_seconds(versions, alone=alone)
            ),
        ),
        update=UpdateHardware(
            seconds=round(median(pauses), 6) if pauses else 0.0,
            fetch_seconds=round(max(0.0, median(fetches)), 6) if fetches else 0.0,
        ),
    )
    kept = seconds <= np.quantile(seconds, 1.0 - TRIM)
    rollout = median(v.waited if alone else v.seconds for v in versions)
    return calibrate_hardware(ObservedRollout(tokens[kept], seconds[kept], rollout), config, rest)


def thin_values(values: Floats) -> Floats:
    """Return at most `QUANTILES` evenly spaced quantiles of the values."""
    values = np.sort(values)
    if len(values) <= QUANTILES:
        return values
    found: Floats = values[((np.arange(QUANTILES) + 0.5) / QUANTILES * len(values)).astype(int)]
    return found


def train_seconds(versions: Sequence[RecordedVersion], *, alone: bool) -> list[float]:
    """Compute, for each policy version, the seconds in which the learner worked.

    The shortest wait is assumed to be for a batch that was ready, and counts as work. With `alone`, the run was
    synchronous (alpha = 0), so no batch was ready before the learner asked for it.
    """
    ready = 0.0 if alone else min(v.waited for v in versions)
    return [max(1e-6, v.seconds - (v.waited - ready)) for v in versions]


def correlation_of(versions: Sequence[RecordedVersion]) -> float:
    """Compute the correlation between the lengths of two responses to the same prompt, as normal scores."""
    tokens = np.concatenate([np.asarray(v.tokens_R, float) for v in versions])
    groups: Floats = np.concatenate([_number_groups(v.groups_R) + 1e6 * i for i, v in enumerate(versions)])
    scores = normal_scores(tokens)
    _, index = np.unique(groups, return_inverse=True)
    sizes = np.bincount(index)
    means = np.bincount(index, scores) / sizes
    within = float(((scores - means[index]) ** 2).sum() / max(1, len(scores) - len(sizes)))
    total = float(scores.var())
    return min(1.0, max(0.0, 1.0 - within / total)) if total > 0 else 0.0


def normal_scores(values: Floats) -> Floats:
    """Convert each value to a normal score: the standard normal quantile of its rank; equal values get equal scores."""
    distinct, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(values)
    normal = NormalDist()
    table = np.array([normal.inv_cdf(float(share)) for share in middles])
    assert len(table) == len(distinct)
    found: Floats = table[index]
    return found


def _number_groups(groups: Sequence[int]) -> Floats:
    return np.unique(np.asarray(groups), return_inverse=True)[1].astype(float)
