"""Simulates scheduling on a virtual clock, and compares rollflow with published results and with ROLL's policy.

All simulations use the shipped scheduler, proxy, controller and channel (`rollflow plan`). ROLL's scheduling policy is
expressed by settings of these parts (`workloads.ROLL`): a batch waits for the groups that were started first, and a
weight update costs a prefill for each running response. Workloads are those of the papers as far as they are published.
Ratios are the baseline's seconds per step divided by rollflow's, unless a row says otherwise. `alpha` is the bound on
staleness. A row says if one side has a larger bound or more slots.

    python -m benchmarks.scheduling [--only scaling ...] [--json FILE]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.baselines import BatchRun, WholeGroupRun
from benchmarks.defaults import defaults
from benchmarks.report import Row, at_least, at_most, run_cases
from benchmarks.workloads import (
    CAP,
    MEDIAN,
    ROLL,
    SLOWINGS,
    UNBIASED,
    bias,
    changed,
    long_tailed,
    of_128,
    ran,
    recipe,
    rollout_only,
)
from rollflow.flows.config import load_hardware
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import SimulatedRun

TAIL: dict[str, Any] = {"tail_batching": True}


# --- RLVR from 16 to 128 GPUs -------------------------------------------------------------------------------


def scaling() -> Iterator[Row]:
    """Simulate ROLL Flash's RLVR result: on 128 GPUs, 2.24x (Base) and 2.12x (Think) the synchronous speed."""
    together = load_hardware(Path("rlvr-128-colocated"))
    for part in (8, 4, 2, 1):
        gpus = 128 // part
        case = f"RLVR, {gpus} GPUs"
        versions = 40 if part == 1 else 10
        all_of, parts = changed(together, engines={"count": gpus}, learner={"gpus": gpus}), of_128(part)
        batch, queue = (ran(recipe(0, 256, 16), all_of, 6, world) for world in (BatchRun, SimulatedRun))
        roll = ran(recipe(2, 256, 16, **ROLL), parts, versions)
        wait = ran(recipe(2, 256, 16, on_stale="wait"), parts, versions)
        ours = ran(recipe(2, 256, 16), parts, versions)
        if part == 1:
            assert batch.shares is not None
            for name in ("rollout", "reward", "train"):
                yield Row(case, f"synchronous: {name}, % (published 72 / 5 / 23)", 100 * getattr(batch.shares, name))
        yield Row(case, "synchronous, batch mode, s", batch.step_seconds)
        yield Row(case, "synchronous, queue scheduling, s", queue.step_seconds)
        yield Row(case, "ROLL's policy, alpha 2, s", roll.step_seconds)
        yield Row(case, "ours with on_stale = wait, alpha 2, s", wait.step_seconds)
        yield Row(case, "ours, alpha 2, s", ours.step_seconds)
        yield Row(case, "bound (Proposition 2), s", ours.bounds.asynchronous_split)
        yield Row(case, "ours over synchronous (queue)", queue.step_seconds / ours.step_seconds)
        if part > 1:
            continue
        yield Row(
            case, "ROLL's policy over synchronous (queue), published 2.24", queue.step_seconds / roll.step_seconds
        )
        yield Row(
            case, "ROLL's policy over synchronous (batch), published 2.24", batch.step_seconds / roll.step_seconds
        )
        yield at_least(case, "ours over ROLL's policy, both alpha 2", roll.step_seconds / ours.step_seconds, 1.05)
        yield at_most(case, "ours / work-conserving limit", ours.step_seconds / ours.bounds.conserving, 1.05)
        yield from bias(case, ours, limit=UNBIASED)


# --- ROLL's policy at equal bound, and at equal staleness ---------------------------------------------------


def staleness() -> Iterator[Row]:
    """Simulate 128 prompts on 32 slots. Compare with ROLL's policy at an equal bound on staleness, and at an equal mean
    staleness.
    """
    case, hardware = "128 prompts, 32 slots", long_tailed()
    roll = {alpha: ran(recipe(alpha, 128, 1, **ROLL), hardware, 200) for alpha in (1, 4)}
    wait = {alpha: ran(recipe(alpha, 128, 1, on_stale="wait"), hardware, 200) for alpha in (1, 4)}
    ours = ran(recipe(4, 128, 1, max_batches_ahead=0.95), hardware, 200)
    for alpha in (1, 4):
        yield Row(case, f"ROLL's policy, alpha {alpha}, s", roll[alpha].step_seconds)
        yield Row(case, f"mean staleness of it, alpha {alpha}", roll[alpha].staleness_mean)
        yield Row(case, f"ours with on_stale = wait, alpha {alpha}, s", wait[alpha].step_seconds)
        yield Row(case, f"mean staleness of it, alpha {alpha}", wait[alpha].staleness_mean)
        equal = roll[alpha].step_seconds / wait[alpha].step_seconds
        yield Row(case, f"waiting over ROLL's policy, both alpha {alpha}", equal)
    yield Row(case, "ours, 0.95 ahead, alpha 4, s", ours.step_seconds)
    yield Row(case, "work-conserving limit of this split, s", ours.bounds.conserving_split)
    mean, ratio = roll[1].staleness_mean, roll[1].step_seconds / ours.step_seconds
    yield at_most(case, "mean staleness, ours at alpha 4 (ROLL's: 1 at alpha 1)", ours.staleness_mean, 1.02 * mean)
    yield at_least(case, "ours at alpha 4 over ROLL's policy at alpha 1: equal mean, larger bound", ratio, 1.5)
    yield from bias(case, ours, limit=UNBIASED)


# --- the influence of engines' slots and slowing ------------------------------------------------------------


def sensitivity() -> Iterator[Row]:
    """Simulate the main results with other numbers of slots per engine. Engines are slowed so that full engines are
    equally fast.
    """
    for slots, slowing in SLOWINGS.items():
        case = f"a quarter of 128 GPUs, {slots} slots, c = {slowing:g}"
        parts = of_128(4, max_concurrent_requests=slots, batch_slowdown=slowing)
        whole = changed(
            load_hardware(Path("rlvr-128-colocated")),
            engines={"max_concurrent_requests": slots, "batch_slowdown": slowing},
        )
        alone = changed(whole, engines={"count": 32}, learner={"gpus": 32})
        yield from _compared(case, 2, ran(recipe(0, 64, 16), alone, 12).step_seconds, parts, (64, 16), 30)
    # the last one is as fast as 32 slots without slowing
    for slots, slowing in ((10, 0.0), (32, 0.0), (128, 0.0), (128, 0.0236)):
        case = f"128 prompts, {slots} slots, c = {slowing:g}"
        hardware = long_tailed(slots, slowing)
        yield from _compared(case, 1, ran(recipe(0, 128, 1), hardware, 60).step_seconds, hardware, (128, 1), 150)
        ours, roll = (
            ran(recipe(a, 128, 1, **how), hardware, 150) for a, how in ((4, {"max_batches_ahead": 0.95}), (1, ROLL))
        )
        yield Row(case, "0.95 ahead at alpha 4 over ROLL's at alpha 1", roll.step_seconds / ours.step_seconds)
        yield from bias(case, ours)
    for slots, slowing in ((10, 0.0), (16, 0.0), (40, 0.0), (40, 0.0385)):  # 128 x 8 on 128 engines
        case = f"tail batching, 128 x 8, 32 extra groups, {slots} slots, c = {slowing:g}"
        hardware = changed(rollout_only(128, slots), engines={"batch_slowdown": slowing})
        plain, tailed = (ran(recipe(0, 128, 8, **how), hardware, 60) for how in ({}, {**TAIL, "redundant_groups": 32}))
        yield Row(case, "over synchronous", plain.step_seconds / tailed.step_seconds)
        yield from bias(case, tailed)


def _compared(
    case: str, alpha: int, synchronous: float, hardware: Hardware, size: tuple[int, int], versions: int
) -> Iterator[Row]:
    """Compare rollflow's scheduling policy with ROLL's at one bound on staleness."""
    roll, ours = (ran(recipe(alpha, *size, **how), hardware, versions) for how in (ROLL, {}))
    yield Row(case, f"synchronous over ours at alpha {alpha}", synchronous / ours.step_seconds)
    yield Row(case, f"ROLL's policy over ours, both alpha {alpha}", roll.step_seconds / ours.step_seconds)
    yield Row(case, "tokens not trained on, ours, %", 100 * sum(ours.tokens.wasted.values()) / ours.tokens.sampled)
    yield from bias(case, ours)


# --- rollout alone ------------------------------------------------------------------------------------------


def tail() -> Iterator[Row]:
    """Simulate RollPacker's tail batching: 128 prompts x 8 responses on 2,048 slots, eta from 1 to 1.5."""
    hardware = rollout_only(128, 16)
    plain = ran(recipe(0, 128, 8), hardware, 200)
    yield Row("tail batching, 128 x 8", "synchronous, s", plain.step_seconds)
    for eta, theirs, after in ((1.125, 2.87, 1), (1.25, 2.91, 1), (1.25, 2.91, 2), (1.5, 2.40, 1)):
        case = f"tail batching, 128 x 8, eta {eta:g}" + (", tail after 2" if after > 1 else "")
        extra = {
            "redundant_groups": round(128 * (eta - 1)),
            "redundant_responses": round(8 * (eta - 1)),
            "max_preemptions": after,
        }
        ours = ran(recipe(0, 128, 8, **TAIL, **extra), hardware, 200)
        ratio = plain.step_seconds / ours.step_seconds
        metric = f"over synchronous, a model of ours gave {theirs:g}"
        yield at_least(case, metric, ratio, 2.9) if eta == 1.25 else Row(case, metric, ratio)
        yield Row(case, "tokens not trained on, %", 100 * sum(ours.tokens.wasted.values()) / ours.tokens.sampled)
        yield from bias(case, ours)
    case = "tail batching, 128 x 8, 32 extra groups, no extra responses"
    ours = ran(recipe(0, 128, 8, **TAIL, redundant_groups=32), hardware, 200)
    yield Row(case, "over synchronous", plain.step_seconds / ours.step_seconds)
    yield from bias(case, ours, limit=UNBIASED)


def queue() -> Iterator[Row]:
    """Simulate ROLL Flash's queue scheduling (8 x 8 responses with a filter). Published: 125 s become 58 s, or 37 s
    with 16 extra prompts.

    Half of the prompts get only correct or only wrong responses, and are filtered. A batch fills 64 slots; free slots
    are refilled at once with up to 4 groups beyond the batch. Redundant groups are issued again, in a separate batch if
    a row says so.
    """
    verdicts = {"seconds": 1.0, "agreeing": 0.5, "accuracy": 0.5}
    narrow, wide = (changed(rollout_only(8, slots), reward=verdicts) for slots in (8, 24))
    keep: dict[str, Any] = {"filter": {"min_mean": 0.0, "max_mean": 1.0}}
    batch = ran(recipe(0, 8, 8, **keep), narrow, 200, BatchRun)
    yield Row("queue scheduling, 8 x 8", "batch mode, s", batch.step_seconds)
    for case, hardware, theirs, target, choices, limit in (
        ("tail batching", narrow, 2.16, 2.16, {"redundant_groups": 4, **TAIL}, UNBIASED),
        ("16 redundant, 3 times the slots", wide, 3.38, 3.4, {"redundant_groups": 16}, None),
        ("the same, tail after 5", wide, 3.38, 3.4, {"redundant_groups": 16, **TAIL, "max_preemptions": 5}, None),
        ("the same, tail after 1", wide, 3.38, None, {"redundant_groups": 16, **TAIL}, UNBIASED),
    ):
        case = f"queue scheduling, 8 x 8, {case}"
        ours = ran(recipe(0, 8, 8, **choices, **keep), hardware, 200)
        metric, ratio = f"over batch mode, published {theirs:g}", batch.step_seconds / ours.step_seconds
        yield at_least(case, metric, ratio, target) if target else Row(case, metric, ratio)
        yield from bias(case, ours, limit=limit)


def replication() -> Iterator[Row]:
    """Simulate ROLL Flash's prompt replication, with published speed-ups of 1.30x, 1.84x and 1.95x for 32 x 16, 64 x 16
    and 16 x 64 responses.
    """
    for groups, size, theirs, slots in ((32, 16, 1.30, 16), (64, 16, 1.84, 16), (16, 64, 1.95, 16)):
        case = f"prompt replication, {groups} x {size}"
        hardware = rollout_only(8, slots)
        held = 8 * max(1, slots // size)  # number of groups for which the 8 engines have slots
        whole = ran(recipe(0, groups, size, max_inflight_groups=held), hardware, 40, WholeGroupRun)
        spread = ran(recipe(0, groups, size), hardware, 40)
        yield Row(case, f"over whole groups, published {theirs:g}", whole.step_seconds / spread.step_seconds)
        yield from bias(case, spread)


# --- how much asynchrony is needed --------------------------------------------------------------------------

ALPHAS = (0, 1, 2, 4, 8)


def needed(case: str, hardware: Hardware, groups: int, cap: int, theirs: int) -> Iterator[Row]:
    """Return the smallest alpha within 5% of the throughput at alpha = 8."""
    figures = {alpha: ran(recipe(alpha, groups, 16, cap=cap), hardware, 12 + 2 * alpha) for alpha in ALPHAS}
    seconds = {alpha: one.step_seconds for alpha, one in figures.items()}
    found = next(alpha for alpha in ALPHAS if seconds[alpha] <= seconds[8] / 0.95)
    yield Row(case, f"alpha needed, published {theirs}", found)
    yield Row(case, "speed-up at it over alpha 0", seconds[0] / seconds[found])
    yield from bias(case, figures[found])


def mean_length(cap: int) -> float:
    """Return the mean of lognormal lengths that are truncated at `cap` (closed form)."""
    z = math.log(cap / MEDIAN)
    cut = statistics.NormalDist().cdf
    return MEDIAN * math.exp(0.5) * cut(z - 1) + cap * (1 - cut(z))


def ratio_needed() -> Iterator[Row]:
    """Simulate which alpha is needed. ROLL Flash published 1, 1, 1, 2 for 4K to 32K tokens, and 4, 2, 2, 2 for 32 to
    256 prompts.
    """
    split = changed(load_hardware(Path("rlvr-128")), engines={"count": 15}, learner={"gpus": 17})
    for cap, theirs in ((4000, 1), (8000, 1), (16000, 1), (32000, 2)):
        # responses are cut at `cap`, so the times of training and scoring scale with the mean length
        shorter = mean_length(cap) / mean_length(CAP)
        training, verdicts = {"seconds_per_trajectory": 3.5 * shorter}, {"seconds": 25 * shorter}
        sized = changed(split, responses={"cap": cap}, learner=training, reward=verdicts)
        yield from needed(f"32 GPUs, 256 prompts, up to {cap:,} tokens", sized, 256, cap, theirs)
    for groups, theirs in ((32, 4), (64, 2), (128, 2)):
        yield from needed(f"32 GPUs, {groups} prompts, up to {CAP:,} tokens", split, groups, CAP, theirs)


CASES: dict[str, Callable[[], Iterator[Row]]] = {
    "scaling": scaling,
    "staleness": staleness,
    "sensitivity": sensitivity,
    "tail": tail,
    "queue": queue,
    "replication": replication,
    "needed": ratio_needed,
    "defaults": defaults,
}


if __name__ == "__main__":
    run_cases(__doc__, CASES, "scheduling, simulated")
