"""Finds, for several workloads, the fastest rollout settings that neither bias training nor waste many tokens.

A *choice* is a set of rollout settings. A choice is unbiased if nothing was discarded, because then every prompt's
first responses are trained on. It is also unbiased if the length bias after the warm-up (see the planner) is at most 1%
in either direction. The bias also depends on chance: on which groups are in flight at the start and at the end of the
measurement. Its standard error shows the size of this effect. If a prompt is issued again under the same policy, an
engine draws the same response, so a dropped response is generated twice. A choice that wastes over 5% of its tokens
cannot be a default, however fast it is. The table also has ROLL's scheduling policy, with the same bound on staleness,
and with the mean staleness of the best choice.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Row
from benchmarks.workloads import ROLL, UNBIASED, Workload, ran, workloads
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.figures import WARM_UP, Figures, simulate_population
from rollflow.tasks.simulation.planner import settled_bias

ALPHAS = (1, 2, 4)
BOUNDS = ("drop", "wait")
WASTEFUL = 0.05  # the largest wasted fraction of all tokens
HEADINGS = (
    "alpha", "ahead", "order", "on stale", "in flight", "step s", "staleness", "most", "bias %", "error", "waste %", "",
)  # fmt: skip

Choice = dict[str, Any]  # keys of `[rollout]`


@dataclass(frozen=True, slots=True)
class Found:
    """The simulation results of a choice of rollout settings."""

    choice: Choice
    figures: Figures
    bias: float
    error: float  # the standard error of the bias

    @property
    def unbiased(self) -> bool:
        """True if the bias is within the limit."""
        return not self.figures.tokens.wasted or abs(self.bias) <= UNBIASED

    @property
    def sound(self) -> bool:
        """True if the choice neither biases training nor wastes many tokens."""
        return self.unbiased and self.wasted <= WASTEFUL

    @property
    def wasted(self) -> float:
        """The wasted fraction of all sampled tokens."""
        return sum(self.figures.tokens.wasted.values()) / max(1, self.figures.tokens.sampled)


def choices(alpha: float, groups: int) -> Iterator[Choice]:
    """Return the choices of rollout settings in the table; the first one is the default."""
    yield {}
    aheads = sorted({alpha, alpha - 0.05, 0.95, 0.5}, reverse=True)
    yield from (
        {"on_stale": bound, "max_batches_ahead": ahead} for bound in BOUNDS for ahead in aheads if ahead <= alpha
    )
    yield {"on_stale": "drop", "max_preemptions": 1}
    yield {"on_stale": "wait", "max_inflight_groups": groups}
    yield ROLL
    if alpha > 1:
        yield {**ROLL, "max_batches_ahead": 0.95}


def defaults() -> Iterator[Row]:
    """Print the tables, each as soon as it is complete. Return the main results as rows."""
    console = Console(width=130, highlight=False)
    for workload in workloads():
        table = Table(title=workload.name, title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading not in ("order", "on stale", "") else "left")
        for alpha in ALPHAS:
            found = [_found(workload, alpha, choice) for choice in choices(alpha, workload.groups)]
            best = min((one for one in found if one.sound), key=_seconds, default=None)
            for one in found:
                table.add_row(*_shown(one, alpha), _mark(one, best), style="bold" if one is best else None)
            yield from _rows(workload, alpha, found, best)
        print(file=sys.stderr)
        console.print(table)


def _rows(workload: Workload, alpha: int, found: list[Found], best: Found | None) -> Iterator[Row]:
    case = f"{workload.name}, alpha {alpha}"
    default, roll = found[0], next(one for one in found if one.choice == ROLL)
    yield Row(case, "default, s", _seconds(default))
    yield Row(case, "bias of it, %", 100 * default.bias)
    yield Row(case, "ROLL's policy, equal bound, s", _seconds(roll))
    if best is None:
        return
    yield Row(case, f"fastest sound: {_named(best)}, s", _seconds(best))
    yield Row(case, "its mean staleness", best.figures.staleness_mean)
    yield Row(case, "ROLL's policy over it, equal bound", _seconds(roll) / _seconds(best))
    mean = min(best.figures.staleness_mean, float(alpha))
    same = _found(workload, math.ceil(mean), {**ROLL, "max_batches_ahead": round(mean, 2)})
    yield Row(case, f"ROLL's policy over it, at mean staleness {same.figures.staleness_mean:.2f}",
              _seconds(same) / _seconds(best))  # fmt: skip


def _found(workload: Workload, alpha: float, choice: Choice) -> Found:
    versions = WARM_UP + math.floor(alpha) + workload.versions
    config = workload.recipe(alpha, **choice)
    figures = ran(config, workload.hardware, versions)
    bias, error = _bias(config, workload, figures)
    return Found(choice, figures, bias, error)


def _bias(config: RunConfig, workload: Workload, figures: Figures) -> tuple[float, float]:
    """Return the length bias after the warm-up, and its standard error. With a filter, the bias is relative to the mean
    length over all prompts.
    """
    timed = config.model_copy(update={"engine": workload.hardware.engine(config)})
    grain = timed.engine.tokens_per_tick  # type: ignore[union-attr]  # it is a timed engine
    drawn = [one.tokens * grain for one in simulate_population(timed, figures.versions * config.groups)]
    if config.rollout.filter is None:
        return settled_bias(figures, drawn)
    trained = figures.trained_tokens[figures.warm_up :]
    mean = statistics.fmean(drawn) * config.groups * config.group_size
    error = statistics.stdev(trained) * math.sqrt(1 / len(trained) + 1 / figures.versions)
    return statistics.fmean(trained) / mean - 1.0, error / mean


def _seconds(one: Found) -> float:
    return one.figures.step_seconds


def _named(one: Found) -> str:
    return ", ".join(f"{key} {value}" for key, value in one.choice.items()) or "default"


def _mark(one: Found, best: Found | None) -> str:
    notes = ["default"] if not one.choice else ["ROLL's"] if one.choice.items() >= ROLL.items() else []
    notes += ["fastest sound"] if one is best else []
    notes += [] if one.unbiased else ["biased"]
    notes += ["wasteful"] if one.wasted > WASTEFUL else []
    return ", ".join(notes)


def _shown(one: Found, alpha: int) -> list[str]:
    rollout, figures = RolloutConfig(**one.choice), one.figures
    return [
        f"{alpha}",
        f"{alpha if rollout.max_batches_ahead is None else rollout.max_batches_ahead:g}",
        rollout.batch_order,
        rollout.on_stale or "-",
        "-" if rollout.max_inflight_groups is None else f"{rollout.max_inflight_groups}",
        f"{figures.step_seconds:,.4g}",
        f"{figures.staleness_mean:.2f}",
        f"{max(figures.staleness, default=0)}",
        f"{100 * one.bias:+.2f}",
        f"{100 * one.error:.2f}",
        f"{100 * one.wasted:.1f}",
    ]
