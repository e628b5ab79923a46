"""Scheduling on a virtual clock: each published result, ROLL's policy simulated, ours, the bound, and the bias.

Everything simulated is the shipped scheduler, proxy, controller and channel (`rollflow simulate`). ROLL's policy is a
choice of it: the batch waits for the groups that were started first, and an update aborts what is in flight.
Workloads are those of the papers as far as they are published: lognormal lengths (sigma 1, cap 20 times the median
unless said), 0.7 correlated within a prompt. Ratios are baseline / ours in seconds of a step unless said.

    python -m benchmarks.scheduling [--only scaling ...] [--json FILE]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Row, arguments, at_least, at_most, publish
from rollflow.flows.config import load_hardware
from rollflow.tasks.settings import RunConfig
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import simulate

ROLL = {"order": "started"}  # with in_flight = "restart"
UNBIASED = 0.02  # largest difference of the mean trained length
MEDIAN, CAP = 1600, 32000
TAIL: dict[str, Any] = {"tail_batching": True}


def recipe(
    alpha: float, groups: int, size: int, *, cap: int = CAP, in_flight: str = "continue", **rollout: Any
) -> RunConfig:
    """A recipe to simulate: N groups of G responses a step."""
    return RunConfig.model_validate(
        {
            "async_ratio": alpha,
            "groups": groups,
            "group_size": size,
            "policy": {"path": "simulated"},
            "engine": {"kind": "vllm", "max_new_tokens": cap, "in_flight": in_flight},
            "rollout": rollout,
            "train": {"baseline": "group" if size > 1 else "none"},
        }
    )


def changed(hardware: Hardware, **sections: dict[str, Any]) -> Hardware:
    """A hardware file with some keys changed."""
    return hardware.model_copy(
        update={name: getattr(hardware, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def ran(config: RunConfig, hardware: Hardware, versions: int) -> Figures:
    """Simulate; a dot on standard error for each simulation."""
    print(".", end="", file=sys.stderr, flush=True)
    return simulate(config, hardware, versions=versions).figures


def bias(case: str, figures: Figures, *, limit: float | None = None) -> Iterator[Row]:
    """The bias rows of a speed-up: trained lengths against the population's."""
    mean, p99 = figures.bias.mean_difference, figures.bias.p99_difference
    yield (
        Row(case, "bias: mean trained length, %", 100 * mean)
        if limit is None
        else at_most(case, "bias: mean trained length, % (either way)", 100 * abs(mean), 100 * limit)
    )
    yield Row(case, "bias: p99 of trained lengths, %", 100 * p99)


# --- RLVR from 16 to 128 GPUs -------------------------------------------------------------------------------


def scaling() -> Iterator[Row]:
    """ROLL Flash, RLVR: 2.24x (Base) and 2.12x (Think) over synchronous at 128 GPUs."""
    together, split = load_hardware(Path("rlvr-128-colocated")), load_hardware(Path("rlvr-128"))
    for gpus in (16, 32, 64, 128):
        case = f"RLVR, {gpus} GPUs"
        versions = 40 if gpus == 128 else 10
        engines = round(gpus * 59 / 128)
        all_of = changed(together, engines={"count": gpus}, learner={"gpus": gpus})
        parts = changed(split, engines={"count": engines}, learner={"gpus": gpus - engines})
        batch, queue = (ran(recipe(0, 256, 16, mode=mode), all_of, 6) for mode in ("batch", "queue"))
        roll = ran(recipe(2, 256, 16, in_flight="restart", **ROLL), parts, versions)
        ours = ran(recipe(2, 256, 16), parts, versions)
        if gpus == 128:
            assert batch.shares is not None
            for name in ("rollout", "reward", "train"):
                yield Row(case, f"synchronous: {name}, % (published 72 / 5 / 23)", 100 * getattr(batch.shares, name))
        yield Row(case, "synchronous, batch mode, s", batch.step_seconds)
        yield Row(case, "synchronous, queue scheduling, s", queue.step_seconds)
        yield Row(case, "ROLL's policy, alpha 2, s", roll.step_seconds)
        yield Row(case, "ours, alpha 2, s", ours.step_seconds)
        yield Row(case, "bound (Proposition 2), s", ours.bounds.asynchronous_split)
        speed_up, over_batch = queue.step_seconds / ours.step_seconds, batch.step_seconds / ours.step_seconds
        if gpus < 128:
            yield Row(case, "ours over synchronous (queue)", speed_up)
            continue
        yield at_least(case, "ours over synchronous (queue), published 2.24", speed_up, 2.24)
        yield at_least(case, "ours over synchronous (batch), published 2.24", over_batch, 2.24)
        yield at_most(case, "ours / work-conserving limit", ours.step_seconds / ours.bounds.conserving, 1.05)
        yield from bias(case, ours)


# --- ROLL's policy at equal staleness -----------------------------------------------------------------------


def staleness() -> Iterator[Row]:
    """128 prompts, 32 slots, training 0.9 of generation: ROLL at alpha = 1 against stragglers that go on."""
    case = "128 prompts, 32 slots, alpha 1"
    mean = MEDIAN * 1.6487
    hardware = changed(
        Hardware(),
        engines={"count": 32, "slots": 1, "seconds_per_token": 0.01},
        responses={"median": MEDIAN, "cap": CAP},
        learner={"gpus": 1, "seconds_per_trajectory": 0.9 * mean * 0.01 / 32},
    )
    roll = ran(recipe(1, 128, 1, in_flight="restart", **ROLL), hardware, 200)
    ours = ran(recipe(4, 128, 1, ahead=0.95), hardware, 200)
    yield Row(case, "ROLL's policy, s", roll.step_seconds)
    yield Row(case, "ours, 0.95 batches ahead, stragglers up to 4 versions, s", ours.step_seconds)
    yield Row(case, "work-conserving limit of this split, s", ours.bounds.conserving_split)
    yield Row(case, "mean staleness, ROLL's policy", roll.staleness_mean)
    yield at_most(case, "mean staleness, ours", ours.staleness_mean, round(1.02 * roll.staleness_mean, 3))
    yield at_most(case, "ours / ROLL's policy", ours.step_seconds / roll.step_seconds, 0.62)
    yield from bias(case, ours, limit=UNBIASED)


# --- rollout alone ------------------------------------------------------------------------------------------


def rollout_only(engines: int, slots: int, **responses: Any) -> Hardware:
    """Engines, and a learner that takes no time."""
    lengths = {"median": MEDIAN, "cap": CAP} | responses
    return changed(Hardware(), engines={"count": engines, "slots": slots, "seconds_per_token": 0.01}, responses=lengths)


def tail() -> Iterator[Row]:
    """RollPacker, tail batching: 128 prompts x 8 responses on 2,048 slots, eta from 1 to 1.5."""
    hardware = rollout_only(128, 16)
    plain = ran(recipe(0, 128, 8), hardware, 200)
    yield Row("tail batching, 128 x 8", "synchronous, s", plain.step_seconds)
    for eta, theirs, after in ((1.125, 2.87, 1), (1.25, 2.91, 1), (1.25, 2.91, 2), (1.5, 2.40, 1)):
        case = f"tail batching, 128 x 8, eta {eta:g}" + (", tail after 2" if after > 1 else "")
        extra = {"extra_groups": round(128 * (eta - 1)), "extra_responses": round(8 * (eta - 1)), "tail_after": after}
        ours = ran(recipe(0, 128, 8, **TAIL, **extra), hardware, 200)
        ratio = plain.step_seconds / ours.step_seconds
        metric = f"over synchronous, a model gave {theirs:g}"
        yield at_least(case, metric, ratio, 2.9) if eta == 1.25 else Row(case, metric, ratio)
        yield Row(case, "tokens not trained on, %", 100 * sum(ours.tokens.wasted.values()) / ours.tokens.sampled)
        yield from bias(case, ours)
    case = "tail batching, 128 x 8, 32 extra groups, no extra responses"
    ours = ran(recipe(0, 128, 8, **TAIL, extra_groups=32), hardware, 200)
    yield Row(case, "over synchronous", plain.step_seconds / ours.step_seconds)
    yield from bias(case, ours, limit=UNBIASED)


def queue() -> Iterator[Row]:
    """ROLL Flash, queue scheduling: 8 x 8 with dynamic sampling: 125 s -> 58 s, and 37 s with 16 redundant prompts.

    Half of the prompts are all right or all wrong, and filtered. A batch fills 64 slots; freed ones refill at once with
    up to 4 groups beyond the batch. What is redundant is issued again: in a batch of its own where that is said.
    """
    verdicts = {"seconds": 1.0, "agreeing": 0.5, "accuracy": 0.5}
    narrow, wide = (changed(rollout_only(8, slots), reward=verdicts) for slots in (8, 24))
    keep = {"filter": {"min_mean": 0.0, "max_mean": 1.0}}
    batch = ran(recipe(0, 8, 8, mode="batch", **keep), narrow, 200)
    yield Row("queue scheduling, 8 x 8", "batch mode, s", batch.step_seconds)
    for case, hardware, theirs, target, choices, limit in (
        ("tail batching", narrow, 2.16, 2.16, {"extra_groups": 4, **TAIL}, UNBIASED),
        ("16 redundant prompts", wide, 3.38, 3.4, {"extra_groups": 16}, None),
        ("16 redundant, tail after 5", wide, 3.38, 3.4, {"extra_groups": 16, **TAIL, "tail_after": 5}, None),
        ("16 redundant, tail after 1", wide, 3.38, None, {"extra_groups": 16, **TAIL}, UNBIASED),
    ):
        case = f"queue scheduling, 8 x 8, {case}"
        ours = ran(recipe(0, 8, 8, **choices, **keep), hardware, 200)
        metric, ratio = f"over batch mode, published {theirs:g}", batch.step_seconds / ours.step_seconds
        yield at_least(case, metric, ratio, target) if target else Row(case, metric, ratio)
        yield from bias(case, ours, limit=limit)


def replication() -> Iterator[Row]:
    """ROLL Flash, prompt replication: 1.30x, 1.84x and 1.95x for 32 x 16, 64 x 16 and 16 x 64."""
    for groups, size, theirs, slots in ((32, 16, 1.30, 16), (64, 16, 1.84, 16), (16, 64, 1.95, 16)):
        case = f"prompt replication, {groups} x {size}"
        hardware = rollout_only(8, slots)
        whole = ran(recipe(0, groups, size, routing="group"), hardware, 40)
        spread = ran(recipe(0, groups, size), hardware, 40)
        yield Row(case, f"over whole groups, published {theirs:g}", whole.step_seconds / spread.step_seconds)
        yield from bias(case, spread)


# --- how much asynchrony is needed --------------------------------------------------------------------------

ALPHAS = (0, 1, 2, 4, 8)


def needed(case: str, hardware: Hardware, groups: int, cap: int, theirs: int) -> Iterator[Row]:
    """The smallest alpha within 5% of the throughput at alpha = 8."""
    figures = {alpha: ran(recipe(alpha, groups, 16, cap=cap), hardware, 12 + 2 * alpha) for alpha in ALPHAS}
    seconds = {alpha: one.step_seconds for alpha, one in figures.items()}
    found = next(alpha for alpha in ALPHAS if seconds[alpha] <= seconds[8] / 0.95)
    yield Row(case, f"alpha needed, published {theirs}", found)
    yield Row(case, "speed-up at it over alpha 0", seconds[0] / seconds[found])
    yield from bias(case, figures[found])


def mean_length(cap: int) -> float:
    """Of lognormal lengths that are cut at `cap` (closed form)."""
    z = math.log(cap / MEDIAN)
    cut = statistics.NormalDist().cdf
    return MEDIAN * math.exp(0.5) * cut(z - 1) + cap * (1 - cut(z))


def ratio_needed() -> Iterator[Row]:
    """ROLL Flash: 1 / 1 / 1 / 2 for 4K to 32K tokens, 4 / 2 / 2 / 2 for 32 to 256 prompts a step."""
    split = changed(load_hardware(Path("rlvr-128")), engines={"count": 15}, learner={"gpus": 17})
    for cap, theirs in ((4000, 1), (8000, 1), (16000, 1), (32000, 2)):
        shorter = mean_length(cap) / mean_length(CAP)  # the same answers, cut: training and verdicts follow the mean
        training, verdicts = {"seconds_per_trajectory": 3.5 * shorter}, {"seconds": 25 * shorter}
        sized = changed(split, responses={"cap": cap}, learner=training, reward=verdicts)
        yield from needed(f"32 GPUs, 256 prompts, up to {cap:,} tokens", sized, 256, cap, theirs)
    for groups, theirs in ((32, 4), (64, 2), (128, 2)):
        yield from needed(f"32 GPUs, {groups} prompts, up to {CAP:,} tokens", split, groups, CAP, theirs)


CASES: dict[str, Callable[[], Iterator[Row]]] = {
    "scaling": scaling,
    "staleness": staleness,
    "tail": tail,
    "queue": queue,
    "replication": replication,
    "needed": ratio_needed,
}


def main() -> None:
    """Simulate and print."""
    options = arguments(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    chosen = options.parse_args()
    rows: list[Row] = []
    for name in chosen.only:
        began = time.perf_counter()
        rows += CASES[name]()
        print(f" {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    publish(rows, "scheduling, simulated", chosen.json)


if __name__ == "__main__":
    main()
