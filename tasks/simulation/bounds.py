"""Computes bounds on the time of a training step: lower bounds for every schedule, and the upper bounds of ROLL
Flash.

N is the number of samples per step, mu and L are the mean and the longest time of a generation, E is the number of
epochs, mu_t is the time to train one sample, and K is the number of workers (GPUs). The time of a generation is
measured on a full engine: an engine with S slots decodes each request at 1 / (1 + c (S - 1)) of the speed for a single
request. Since S samples share an engine, one sample takes mu = seconds x GPUs of the engine / S GPU-seconds, and K
counts GPUs. mu_0 is the mean time at the number of concurrent requests at which the mean time is smallest.

    work-conserving      (N/K) (mu_0 + E mu_t)               whatever the schedule, if every GPU could do everything
    T_sync           <=  (N/K) (mu + E mu_t) + L
    beta*             =  E N mu_t / (N mu + K L/(alpha+1) + E N mu_t)    best share of the GPUs for training
    T_async(beta*)   <=  (N/K) (mu + E mu_t) + L/(alpha+1)
    T_async(split)   <=  max((N/K_r) mu + L/(alpha+1), (N/K_t) E mu_t)   with K_r and K_t GPUs as the file splits them
    gain             <=  1 + K L / (N (mu + E mu_t))

The bounds ignore rewards, weight updates, and the costs of the KV cache. Where the ignored parts cost time, the lower
bounds still hold, but the upper bounds do not (`Bounds.guaranteed`).

The *freshness limit* is a lower bound on the time of a step, and depends on alpha (the largest staleness). It holds for
every schedule that trains the same batches, even with infinitely many engines. P_v is the time at which policy version
v is published, w_b is the shortest time in which the longest response of batch b can be generated and scored after a
version was published, and t_b is the time to train batch b, which gives version b + 1. With a = alpha, rounded down:

    P_b+1  >=  max(P_b, P_b-a + w_b) + t_b           so the mean step is at least the mean of w_b + t_b, over a + 1

Proof: every response of batch b was started under version b - a or a newer one, so after P_b-a. The learner starts to
train batch b once version b is published and the batch is complete. The bound on the mean step follows because the sum
of P_b+1 - P_b-a over all batches counts each step at most a + 1 times. With enough slots, the schedule that starts all
responses of batch b at P_b-a attains the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Workload:
    """The numbers that describe a workload; mu and mu_t are in GPU-seconds, the longest generation is in seconds."""

    samples: int  # N, number of samples per step
    mu: float  # mu, mean time of a generation on a full engine
    mu_least: float  # mu_0, mean time of a generation at the best number of concurrent requests
    longest: float  # L, longest time of a generation
    mu_train: float  # E mu_t, time to train one sample in all epochs
    rollout_gpus: float  # K_r, number of GPUs for rollout
    train_gpus: float  # K_t, number of GPUs for training
    colocated: bool  # True if rollout (K_r) and training (K_t) use the same GPUs
    async_ratio: float  # alpha, the largest staleness
    whole: bool = True  # True if these numbers include all costs except rewards and weight updates


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on the seconds of a training step, and the best share of the GPUs for training."""

    conserving: float
    conserving_split: float  # lower bound in seconds for any schedule with this division of the GPUs
    sync: float
    asynchronous: float
    asynchronous_split: float
    best_training_share: float
    largest_gain: float
    guaranteed: bool  # True if the upper bounds of Proposition 2 hold for this hardware


def bounds_of(work: Workload) -> Bounds:
    """Compute the bounds of Proposition 2 of the ROLL Flash paper for a workload."""
    gpus = work.rollout_gpus + (0.0 if work.colocated else work.train_gpus)
    rollout, train = work.samples * work.mu, work.samples * work.mu_train
    least = work.samples * work.mu_least
    full, waiting = (rollout + train) / gpus, work.longest / (work.async_ratio + 1.0)
    rolling, training = rollout / work.rollout_gpus, train / work.train_gpus
    least_rolling = least / work.rollout_gpus
    return Bounds(
        conserving=(least + train) / gpus,
        conserving_split=least_rolling + training if work.colocated else max(least_rolling, training),
        sync=full + work.longest,
        asynchronous=full + waiting,
        asynchronous_split=rolling + waiting + training if work.colocated else max(rolling + waiting, training),
        best_training_share=train / (rollout + gpus * waiting + train),
        largest_gain=1.0 + work.longest / full,
        guaranteed=work.whole,
    )


def work_of(
    config: RunConfig,
    hardware: Hardware,
    lengths: Sequence[int],
    speeds: Sequence[float],
    versions: Sequence[int] = (1,),
) -> Workload:
    """Compute the workload's numbers from simulated response lengths (in real tokens) and the engines' speeds.

    `versions` are the numbers of the trained policy versions, because the hardware file may have a measured time for
    each train step.
    """
    engines, learner = hardware.engines, hardware.learner
    slots = engines.max_concurrent_requests or config.engine.max_concurrent_requests
    # factor by which a full engine slows each request, compared with a single request
    share = 1.0 + engines.batch_slowdown * (slots - 1)

    def seconds(tokens: float) -> float:
        return (engines.prefill_seconds + tokens * engines.seconds_per_token) * share

    mean, samples = sum(lengths) / len(lengths), config.groups * config.group_size
    per_step = fmean(hardware.train_seconds(version, samples, samples * mean) for version in versions)
    mu = seconds(mean) * engines.gpus_per_engine / slots
    return Workload(
        samples=samples,
        mu=mu,
        mu_least=mu * min(1.0, slots / share),
        longest=seconds(max(lengths)) / min(speeds),
        mu_train=per_step * learner.gpus / samples,
        rollout_gpus=sum(speeds) * engines.gpus_per_engine,
        train_gpus=learner.gpus,
        colocated=learner.colocated,
        async_ratio=config.async_ratio,
        whole=not (engines.kv_read_cost or engines.kv_tokens or engines.prefill_seconds_per_token),
    )


def earliest_publications(
    published: Sequence[float], waits_B: Sequence[float], training_B: Sequence[float], async_ratio: float
) -> list[float]:
    """Compute the earliest times at which the policy versions can be published, by the freshness limit.

    Args:
        published: the times at which the first policy versions were published; at least that of version 0.
        waits_B: for each later batch, the shortest time in which its longest response can be generated and scored
            (w_b), in seconds.
        training_B: for each later batch, the time to train on it (t_b), in seconds.
    """
    times, allowed = list(published), math.floor(async_ratio)
    for wait, training in zip(waits_B, training_B, strict=True):
        oldest = max(0, len(times) - 1 - allowed)  # the next batch has the number of the newest version
        times.append(max(times[-1], times[oldest] + wait) + training)
    return times
