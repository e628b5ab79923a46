"""Defines the workloads of `benchmarks.scheduling`, and helpers that its sections share.

Lengths are lognormal (sigma 1, truncated at 20 times the median unless stated), with correlation 0.7 within a prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Row, at_most
from rollflow.flows.config import load_hardware
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import SimulatedRun, simulate

# ROLL's policy: (1 + alpha) batches are admitted. A batch takes the prompts that were started first, and waits for
# them. A weight update sends all running requests again with their tokens, which costs a prefill for each request.
ROLL: dict[str, Any] = {"batch_order": "started", "on_stale": "wait"}
UNBIASED = 0.01  # largest relative difference of the mean trained length
MEDIAN, CAP = 1600, 32000
MEAN = MEDIAN * 1.6487  # mean of lognormal lengths that are not truncated


def recipe(alpha: float, groups: int, size: int, *, cap: int = CAP, **rollout: Any) -> RunConfig:
    """Return a recipe with `groups` groups of `size` responses per step. It has no evaluations, like the published
    measurements.
    """
    return RunConfig.model_validate(
        {
            "async_ratio": alpha,
            "groups": groups,
            "group_size": size,
            "policy": {"path": "simulated"},
            "engine": {"kind": "vllm", "max_new_tokens": cap},
            "rollout": rollout,
            "evaluation": {"every": 0},
            "train": {"baseline": "group" if size > 1 else "none"},
        }
    )


def changed(hardware: Hardware, **sections: dict[str, Any]) -> Hardware:
    """Return a hardware file with some keys changed."""
    return hardware.model_copy(
        update={name: getattr(hardware, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def ran(config: RunConfig, hardware: Hardware, versions: int, world_type: type[SimulatedRun] = SimulatedRun) -> Figures:
    """Run a simulation, and print a dot on standard error."""
    print(".", end="", file=sys.stderr, flush=True)
    return simulate(config, hardware, versions=versions, world_type=world_type).figures


def bias(case: str, figures: Figures, *, limit: float | None = None) -> Iterator[Row]:
    """Return rows with the length bias: how the trained lengths differ from those of all prompts."""
    mean, p99 = figures.bias.mean_difference, figures.bias.p99_difference
    yield (
        Row(case, "bias: mean trained length, %", 100 * mean)
        if limit is None
        else at_most(case, "bias: mean trained length, % (either way)", 100 * abs(mean), 100 * limit)
    )
    yield Row(case, "bias: p99 of trained lengths, %", 100 * p99)


def rollout_only(engines: int, slots: int, **responses: Any) -> Hardware:
    """Return hardware with engines, and a learner that takes no time."""
    lengths = {"median": MEDIAN, "cap": CAP} | responses
    return changed(
        Hardware(),
        engines={"count": engines, "max_concurrent_requests": slots, "seconds_per_token": 0.01},
        responses=lengths,
    )


def long_tailed(slots: int = 32, slowing: float = 0.0) -> Hardware:
    """Return a workload of 128 prompts with one response per step, on one engine with `slots` equal slots.

    Training takes 0.9 of the time that 32 slots need to generate.
    """
    return changed(
        rollout_only(32, 1) if slots == 32 and not slowing else rollout_only(1, slots),
        engines={"batch_slowdown": slowing},
        learner={"gpus": 1, "seconds_per_trajectory": 0.9 * MEAN * 0.01 / 32},
    )


def of_128(part: int = 1, **engines: Any) -> Hardware:
    """Return a workload with 256 prompts x 16 responses per step on 128 GPUs (59 for rollout, 69 for training), or 1 /
    `part` of it.
    """
    count = round(59 / part)
    return changed(
        load_hardware(Path("rlvr-128")), engines={"count": count} | engines, learner={"gpus": 128 // part - count}
    )


# Slots of an engine -> the slowing c with which a full engine is as fast as a full one with 10 slots at c = 0.005.
SLOWINGS = {10: 0.005, 40: 0.0815, 128: 0.0975}


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload in the table of defaults."""

    name: str
    hardware: Hardware
    groups: int
    size: int
    versions: int  # the number of versions after the warm-up
    cap: int = CAP
    rollout: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, alpha: float, **rollout: Any) -> RunConfig:
        """Return the workload's recipe with changed keys."""
        return recipe(alpha, self.groups, self.size, cap=self.cap, **{**self.rollout, **rollout})


def workloads() -> Iterator[Workload]:
    """Return the workloads of the scheduling benchmark, the largest one at a quarter of its size."""
    for slots, slowing in SLOWINGS.items():
        quarter = of_128(4, max_concurrent_requests=slots, batch_slowdown=slowing)
        yield Workload(f"a quarter of 128 GPUs, {slots} slots, c = {slowing:g}", quarter, 64, 16, 24)
    yield Workload("128 prompts, 32 slots", long_tailed(), 128, 1, 100)
    fewer = changed(load_hardware(Path("rlvr-128")), engines={"count": 15}, learner={"gpus": 17})
    yield Workload("32 GPUs, 32 prompts", fewer, 32, 16, 32)
    short = changed(fewer, responses={"cap": 4000})
    yield Workload("32 GPUs, 128 prompts, up to 4,000 tokens", short, 128, 16, 12, cap=4000)
    yield Workload("rollout alone, 128 x 8 on 2,048 slots", rollout_only(128, 16), 128, 8, 24)
    verdicts = changed(rollout_only(8, 8), reward={"seconds": 1.0, "agreeing": 0.5, "accuracy": 0.5})
    keep = {"filter": {"min_mean": 0.0, "max_mean": 1.0}}
    yield Workload("rollout alone, 8 x 8 on 64 slots, half filtered", verdicts, 8, 8, 200, rollout=keep)
