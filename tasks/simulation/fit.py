"""A hardware file made from what a run recorded: its latencies, lengths, train steps and updates.

- Responses: the measured lengths (thinned to `QUANTILES`), and the correlation of their normal scores within a prompt.
- Engines: a generation of t tokens took p + s t seconds (least squares; without the share of the time in which updates
  held the engines up, which a simulation adds again) at the concurrency n of the run; n follows from
  Little's law, the sum of all generation seconds over the time they took. How s depends on n is read from the versions
  (each has its own s and n) where they differ enough; else an engine is taken to be shared in proportion.
- Learner: each version's own time, from the batch in hand to the next one asked for, replayed in order.
- Updates: the median pause, and the median time from a version's publishing to its pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.settings import RunConfig
from rollflow.tasks.simulation.hardware import (
    EnginesHardware,
    Hardware,
    LearnerHardware,
    ResponsesHardware,
    RewardHardware,
    UpdateHardware,
)

QUANTILES = 400  # values that stand for a measured distribution
TRIM = 0.01  # share of the longest generations that does not count: a restart, a stall
SPREAD = 0.15  # of the versions' concurrencies, relative to their mean, from which their difference says something

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


@dataclass(frozen=True, slots=True)
class Decoding:
    """A generation of t tokens among n takes (prefill + t x per_token) x (1 + slowing x (n - 1)) seconds."""

    prefill: float
    per_token: float
    slowing: float


def fitted(versions: Sequence[Recorded], config: RunConfig) -> Hardware:
    """The hardware that these versions (those after a warm-up) ran on."""
    tokens = np.concatenate([np.asarray(v.tokens_R, float) for v in versions])
    decoding = decoding_of(versions, config.engine.replicas)
    rewards = np.concatenate([np.asarray(v.reward_R, float) for v in versions])
    pauses = [v.pause for v in versions if v.pause is not None]
    fetches = [v.fetched for v in versions if v.fetched is not None]
    return Hardware(
        title="as recorded",
        engines=EnginesHardware(
            prefill_seconds=round(decoding.prefill, 9),
            seconds_per_token=max(1e-9, round(decoding.per_token, 9)),
            slowing=round(decoding.slowing, 9),
        ),
        responses=ResponsesHardware(
            lengths=tuple(int(length) for length in thinned(tokens)), correlation=correlation_of(versions), grain=1
        ),
        reward=RewardHardware(measured=tuple(round(float(x), 6) for x in thinned(rewards))),
        learner=LearnerHardware(measured=tuple(round(x, 6) for x in train_seconds(versions))),
        update=UpdateHardware(
            seconds=round(median(pauses), 6) if pauses else 0.0,
            fetch_seconds=round(max(0.0, median(fetches)), 6) if fetches else 0.0,
        ),
    )


def thinned(values: Floats) -> Floats:
    """At most `QUANTILES` values with the same distribution, from the middle of equal shares."""
    values = np.sort(values)
    if len(values) <= QUANTILES:
        return values
    found: Floats = values[((np.arange(QUANTILES) + 0.5) / QUANTILES * len(values)).astype(int)]
    return found


def train_seconds(versions: Sequence[Recorded]) -> list[float]:
    """What the learner itself took; the shortest wait of all is what a batch that lay ready costs: it belongs to it."""
    ready = min(v.waited for v in versions)
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


def decoding_of(versions: Sequence[Recorded], engines: int) -> Decoding:
    """How fast the engines decode; see the module's docstring."""
    tokens = np.concatenate([np.asarray(v.tokens_R, float) for v in versions])
    seconds = np.concatenate([_decoding_seconds(v) for v in versions])
    kept = seconds <= np.quantile(seconds, 1.0 - TRIM)
    prefill, per_token = line(tokens[kept], seconds[kept])
    active = [float(np.sum(v.generation_R)) / max(v.seconds, 1e-9) / engines for v in versions]
    expected = [float(np.sum(prefill + per_token * np.asarray(v.tokens_R))) for v in versions]
    scale = [float(_decoding_seconds(v).sum()) / by_line for v, by_line in zip(versions, expected, strict=True)]
    mean = max(1.0, float(np.mean(active)))
    # scale = (1 + c (n - 1)) / (1 + c (mean - 1)): 1 at the mean, and with this slope in n
    slope = 1.0 / mean
    if np.std(active) > SPREAD * mean:
        slope = min(slope, max(0.0, line(np.array(active), np.array(scale))[1]))
    slowing = slope / max(1e-9, 1.0 - slope * (mean - 1.0))
    share = 1.0 + slowing * (mean - 1.0)
    return Decoding(prefill / share, max(per_token / share, 1e-9), slowing)


def _decoding_seconds(version: Recorded) -> Floats:
    """(R): what each generation took, less what updates held it up on average."""
    paused = min(0.9, (version.pause or 0.0) / max(version.seconds, 1e-9))
    return np.asarray(version.generation_R, float) * (1.0 - paused)


def line(x: Floats, y: Floats) -> tuple[float, float]:
    """Least squares y = a + b x with a, b >= 0."""
    spread = float(((x - x.mean()) ** 2).sum())
    b = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0 else 0.0
    a = float(y.mean()) - b * float(x.mean())
    if b < 0:
        return max(0.0, float(y.mean())), 0.0
    if a < 0:
        return 0.0, float((x * y).sum() / max(1e-12, (x * x).sum()))
    return a, b


def _numbered(groups: Sequence[int]) -> Floats:
    return np.unique(np.asarray(groups), return_inverse=True)[1].astype(float)
