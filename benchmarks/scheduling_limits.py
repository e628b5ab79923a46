"""Compares simulated schedules with bounds that no schedule can beat, and shows why they are slower than the bounds.

    python -m benchmarks.scheduling_limits [--only shares tail] [--json FILE]

`shares` simulates RLVR on 128 GPUs. `tail` simulates a fixed batch on 1,024 GPUs, as in Laminar (arXiv 2510.12633),
with lengths whose 99th percentile is ten times the median. The baseline is synchronous on the same GPUs: a batch is
generated, then scored, then trained on.

- *The bound* is the step time of the work alone, if every GPU could generate and train at any time.
- *The freshness limit* depends on alpha (see `tasks/simulation/bounds.py`).
- *Bias* is the relative difference of the mean trained length from the mean of all drawn lengths after the warm-up,
  with its standard error.
- *Known lengths* starts the prompts of a batch in the order of their expected length, longest first. A real scheduler
  does not know this order. The row shows how much time is lost because the lengths are unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines import BatchRun
from benchmarks.report import Row, at_least, at_most, run_cases
from benchmarks.workloads import UNBIASED, changed, of_128, ran, recipe
from rollflow.flows.config import load_hardware
from rollflow.tasks.engines.lengths import draw_prompt_number
from rollflow.tasks.rollout.mixing import Mixture
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.figures import Figures, simulate_population
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.planner import settled_bias
from rollflow.tasks.simulation.world import SimulatedRun

PARTS = 1  # `shares` runs on 1 / PARTS of the 128 GPUs, with 1 / PARTS of the prompts
WIDTH = 1024  # number of GPUs of `tail`
VERSIONS = 20  # number of versions after the warm-up
TAIL_SIGMA = 0.9898  # sigma of the lognormal distribution whose 99th percentile is ten times the median
CHOICES: tuple[tuple[float, float | None], ...] = ((1, None), (2, None), (3, 2), (3, 1.5))  # alpha, ahead


# --- idle time ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class IdleTime:
    """Sums over a simulated run since its start: slot-seconds by cause, and idle seconds of the learner."""

    slots: float = 0.0  # slot-seconds of all slots
    held: float = 0.0  # slot-seconds of free slots while the staleness limit allows no new group
    free: float = 0.0  # slot-seconds of other free slots
    waited: float = 0.0  # seconds in which the idle learner waited for a response that would become too old


class WatchedRun(SimulatedRun):
    """A simulated run that records once a second why slots are free."""

    newest: WatchedRun

    def __init__(self, *positional: Any) -> None:
        super().__init__(*positional)
        type(self).newest = self
        self.sums, self.marks = IdleTime(), dict[int, IdleTime]()

    async def run(self, versions: int, watch: Callable[[int], None]) -> None:
        def mark(version: int) -> None:
            sums = self.sums
            self.marks[version] = IdleTime(sums.slots, sums.held, sums.free, self.scheduler.counts.waited.seconds)
            watch(version)

        looking = asyncio.create_task(self._look())
        try:
            await super().run(versions, mark)
        finally:
            looking.cancel()

    async def _look(self) -> None:
        slots = len(self.engines) * self.engine.max_concurrent_requests
        while True:
            await asyncio.sleep(1.0)
            free = slots - sum(engine.active for engine in self.engines.values())
            self.sums.slots += slots
            if self.scheduler.counts.held.since is not None:
                self.sums.held += free
            else:
                self.sums.free += free


class LongestFirst(Mixture):
    """Issues the prompts of each batch in the order of their expected length, longest first."""

    groups: int

    def next(self) -> int:
        place = super().next()
        first = place - place % self.groups
        prompts = sorted(range(first, first + self.groups), key=lambda prompt: -draw_prompt_number((prompt,)))
        return prompts[place - first]


class KnownLengthsScheduler(RolloutScheduler):
    """The shipped scheduler, with prompts in the order of their expected length."""

    def __init__(self, *positional: Any) -> None:
        super().__init__(*positional)
        known = LongestFirst(self.limits.shares)
        known.groups = self.limits.groups
        self._order._mixture = known


class KnownLengthsRun(WatchedRun):
    """A simulated run whose scheduler knows which prompts have long responses."""

    scheduler_type = KnownLengthsScheduler


# --- rows of one run ----------------------------------------------------------------------------------------


def judged(case: str, config: RunConfig, figures: Figures, hardware: Hardware) -> Iterator[Row]:
    """Return the costs of a schedule: its staleness, bias and waste."""
    timed = config.model_copy(update={"engine": hardware.engine(config)})
    grain = timed.engine.tokens_per_tick  # type: ignore[union-attr]  # it is a timed engine
    drawn = [one.tokens * grain for one in simulate_population(timed, figures.versions * config.groups)]
    drift, error = settled_bias(figures, drawn)
    wasted = sum(figures.tokens.wasted.values()) / max(1, figures.tokens.sampled)
    yield Row(case, "mean staleness", figures.staleness_mean)
    yield Row(case, "largest staleness", max(figures.staleness))
    yield at_most(case, "bias, %, less two standard errors", 100 * max(0.0, abs(drift) - 2 * error), 100 * UNBIASED)
    yield Row(case, "bias, %", 100 * drift)
    yield Row(case, "standard error of it", 100 * error)
    yield at_most(case, "tokens wasted, %", 100 * wasted, 0.0)


def idle(case: str, figures: Figures) -> Iterator[Row]:
    """Return how the slots and the learner spent their time in the newest simulated run."""
    marks, first, last = WatchedRun.newest.marks, figures.warm_up, figures.versions
    slots, steps = marks[last].slots - marks[first].slots, last - first
    yield Row(case, "slots: free, staleness limit, %", 100 * (marks[last].held - marks[first].held) / slots)
    yield Row(case, "slots: free, other, %", 100 * (marks[last].free - marks[first].free) / slots)
    yield Row(case, "slots: paused by updates, %", 100 * figures.update_share)
    waited = (marks[last].waited - marks[first].waited) / steps
    yield Row(case, "learner: waits for a response that would become too old, s a step", waited)
    yield Row(case, "learner: waits for enough groups, s a step", figures.idle.learner * figures.step_seconds - waited)


# --- 128 GPUs -----------------------------------------------------------------------------------------------


def shares() -> Iterator[Row]:
    """Simulate RLVR on 128 GPUs at several values of alpha; the target is 0.95 of the bound."""
    hardware, groups = of_128(PARTS), 256 // PARTS
    together = changed(
        load_hardware(Path("rlvr-128-colocated")), engines={"count": 128 // PARTS}, learner={"gpus": 128 // PARTS}
    )
    queue = ran(recipe(0, groups, 16), together, 6).step_seconds
    for alpha, ahead in CHOICES:
        chosen: dict[str, Any] = {} if ahead is None else {"max_batches_ahead": ahead}
        case = f"{128 // PARTS} GPUs, alpha {alpha:g}" + (f", {ahead:g} ahead" if chosen else "")
        yield from _share(case, recipe(alpha, groups, 16, **chosen), hardware, queue, WatchedRun)
    yield from _share("the same, alpha 2, known lengths", recipe(2, groups, 16), hardware, queue, KnownLengthsRun)


def _share(
    case: str, config: RunConfig, hardware: Hardware, synchronous: float, world: type[SimulatedRun]
) -> Iterator[Row]:
    figures = ran(config, hardware, VERSIONS + config.capacity + 1, world)
    step = figures.step_seconds
    yield Row(case, "s a step", step)
    yield Row(case, "bound, s", figures.bounds.conserving)
    yield Row(case, "freshness limit, s", figures.freshness_limit)
    yield at_least(case, "share of the bound", figures.bounds.conserving / step, 0.95)
    yield Row(case, "synchronous (queue) over it", synchronous / step)
    yield from judged(case, config, figures, hardware)
    yield from idle(case, figures)


# --- 1,024 GPUs ---------------------------------------------------------------------------------------------


def tailed(engines: int, cap: int, **sections: Any) -> Hardware:
    """Return hardware with `WIDTH` GPUs and long-tailed lengths. If all GPUs are engines, rollout and training take
    turns on them.
    """
    turns = engines == WIDTH
    found = changed(
        load_hardware(Path("rlvr-128-colocated" if turns else "rlvr-128")),
        engines={"count": engines},
        learner={"gpus": WIDTH if turns else WIDTH - engines},
        responses={"sigma": TAIL_SIGMA, "cap": cap},
    )
    return changed(found, **sections)


def tail() -> Iterator[Row]:
    """Simulate 512 prompts x 16 responses a step on 1,024 GPUs; the target is 5.5 times the synchronous speed."""
    groups = WIDTH // 2
    for cap, alphas in ((32_000, (8, 4)), (16_000, (4,))):
        case = f"{WIDTH:,} GPUs, up to {cap // 1600} x median"
        synchronous = ran(recipe(0, groups, 16, cap=cap), tailed(WIDTH, cap), 5, BatchRun).step_seconds
        yield Row(case, "synchronous, s a step", synchronous)
        for alpha in alphas:
            chosen = {"max_batches_ahead": 2}
            yield from _gain(f"{case}, alpha {alpha}", recipe(alpha, groups, 16, cap=cap, **chosen), cap, synchronous)


def _gain(case: str, config: RunConfig, cap: int, synchronous: float) -> Iterator[Row]:
    hardware = tailed(round(WIDTH * 59 / 128), cap)
    figures = ran(config, hardware, VERSIONS + config.capacity + 1, WatchedRun)
    limit = max(figures.bounds.conserving, figures.freshness_limit)
    yield Row(case, "s a step", figures.step_seconds)
    yield Row(case, "bound of the gain (work)", synchronous / figures.bounds.conserving)
    yield Row(case, "bound of the gain (work and freshness)", synchronous / limit)
    yield at_least(case, "synchronous over it", synchronous / figures.step_seconds, 5.5)
    yield from judged(case, config, figures, hardware)
    yield from idle(case, figures)


CASES: dict[str, Callable[[], Iterator[Row]]] = {"shares": shares, "tail": tail}


if __name__ == "__main__":
    run_cases(__doc__, CASES, "limits of scheduling, simulated")
