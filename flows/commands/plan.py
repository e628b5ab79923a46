"""Implements `rollflow plan`, which simulates on one machine how fast a recipe would train on other hardware.

With `--gpus`, the command searches for the best split of the GPUs between rollout and training and the best limit on
the age of samples (`async_ratio`). The best candidates are printed, each with a proven upper bound on the time of a
train step. With `--write`, the recommended recipe and its hardware file are written. This module imports neither Ray
nor torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.commands.cli.plan_costs import describe_costs, load_prices
from rollflow.flows.commands.cli.prediction import compare
from rollflow.flows.commands.cli.toml_edit import rewrite_toml
from rollflow.flows.config import hardware_file, load_hardware, load_recipe
from rollflow.flows.locations import find_run
from rollflow.flows.views.console import format_duration
from rollflow.flows.views.timelines.simulation import Outputs, as_json, run_simulation
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.candidates import FULL, QUICK, Candidate, CandidateOutcome, PlanLimits
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.planner import TOLERANCE, Plan, plan
from rollflow.tasks.simulation.prices import Prices, cost_of

WIDTH = 180  # Width of the printed table in characters if the output is not a terminal.
# Matches the comment that `_write_files` put at the top of the recipe of an earlier plan.
EARLIER = re.compile(r"\A# Planned for .*\n(# changed: .*\n)*\n?")
HEADINGS = (
    "rollout:train", "alpha", "step s", "traj/s", "speed-up", "idle", "staleness", "wasted", "length bias",
    "Prop. 2 s", "beta*", "redundancy", "",
)  # fmt: skip


def command(options: argparse.Namespace) -> int:
    """Simulate the recipe with its own settings. With `--gpus`, search for the best plan instead."""
    config = load_recipe(options.recipe, options.set)
    if options.gpus is None:
        _simulate(config, options)
        return OK
    planned = run_plan(config, load_hardware(options.hardware), _build_request(options))
    return OK if planned.recommended else FAILED


def _simulate(config: RunConfig, options: argparse.Namespace) -> None:
    """Simulate the recipe on the given hardware. With `--from-run`, the hardware is fitted to a recorded run, and the
    simulation is compared with the run.
    """
    outputs = Outputs.of(options.plot, options.json)
    if options.from_run is None:
        run_simulation(config, load_hardware(options.hardware), options.versions, outputs)
    else:
        compare(config, find_run(options.from_run, options.store), options.versions, outputs, options.save_hardware)


def _build_request(options: argparse.Namespace) -> PlanRequest:
    def given(name: str, default: float) -> Any:
        return default if getattr(options, name) is None else getattr(options, name)

    recipe, machines = (f.read_text(encoding="utf-8-sig") for f in (options.recipe, hardware_file(options.hardware)))
    return PlanRequest(
        options.recipe, recipe, machines, options.gpus, given("alpha", 8.0), given("best", 6), options.quick,
        PlanLimits(given("max_bias", 0.02), given("max_waste", 0.15)), options.write, options.json,
        load_prices(options.cost) if options.cost else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of a search for the best plan, and the files to write."""

    recipe: Path
    text: str  # Text of the recipe file, including its comments.
    hardware_text: str  # Text of the hardware file, including its comments.
    gpus: int
    largest: float
    best: int
    quick: bool
    limits: PlanLimits
    write: Path | None
    json: Path | None
    prices: Prices | None = None

    @property
    def hardware_file(self) -> Path:
        """The path of the hardware file that is written next to the planned recipe."""
        assert self.write is not None
        return self.write.with_name(f"{self.write.stem}-hardware.toml")

    def check(self) -> None:
        """Check the options before the search starts, because a search takes minutes.

        Raises:
            ConfigError: an option is out of its range, or a file cannot be written.
        """
        for name, value in (("alpha", self.largest), ("max-bias", self.limits.bias), ("max-waste", self.limits.waste)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"--{name} {value:g}: give a number of 0 or more")
        for path in filter(None, (self.write, self.json)):
            if not path.parent.is_dir():
                raise ConfigError(
                    f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}; create it"
                )
        if self.write and self.recipe.exists() and self.write.resolve() == self.recipe.resolve():
            raise ConfigError(f"--write {str(self.write)!r} is the recipe itself; give another name")


def run_plan(config: RunConfig, hardware: Hardware, asked: PlanRequest, *, console: Console | None = None) -> Plan:
    """Search for the best plan for a recipe, print the result, and write the requested files."""
    asked.check()
    console = console or _console()
    budget, began = QUICK if asked.quick else FULL, time.monotonic()
    with _show_progress(budget.simulations) as watch:
        planned = plan(
            config, hardware, asked.gpus, largest=asked.largest, budget=budget, limits=asked.limits, watch=watch
        )
    console.print(build_table(planned, config, asked))
    for sentence in describe_plan(planned, asked, time.monotonic() - began):
        console.print(sentence, soft_wrap=True)
    if asked.prices is not None:
        for sentence in describe_costs(planned, asked.prices, config, hardware):
            console.print(sentence, soft_wrap=True)
    if asked.write is not None and planned.recommended is not None:
        _write_files(planned.recommended, config, hardware, asked, console)
    if asked.json is not None:
        asked.json.write_text(json.dumps(plan_to_json(planned, config, hardware, asked.limits, asked.prices), indent=2))
        console.print(f"figures in {asked.json}", soft_wrap=True)
    return planned


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(WIDTH, console.width))


@contextmanager
def _show_progress(most: int) -> Iterator[Callable[[int, CandidateOutcome], None]]:
    """Show the progress of a search for the best plan on standard error."""
    console = Console(file=sys.stderr, highlight=False)
    if not console.is_terminal:
        yield lambda count, one: console.print(
            f"simulation {count} of at most {most}: {_describe_outcome(one)}", soft_wrap=True
        )
        return
    columns = (TextColumn("simulation {task.completed} of at most {task.total}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console, transient=True) as bar:
        task = bar.add_task("plan", total=most, last="")
        yield lambda count, one: bar.update(task, completed=count, last=_describe_outcome(one))


def _describe_outcome(one: CandidateOutcome) -> str:
    extra = describe_redundancy(one.candidate)
    return (
        f"{describe_split(one.candidate)} alpha {one.candidate.async_ratio:g}{', ' + extra if extra else ''}: "
        f"{one.versions} versions, step {one.figures.step_seconds:,.4g} s"
    )


# --- what a person reads -------------------------------------------------------------------------------------


def build_table(planned: Plan, config: RunConfig, asked: PlanRequest) -> Table:
    """Build a table of the best configurations that the search found."""
    found = Table(
        title=f"{config.name} on {asked.gpus} GPUs", title_justify="left", box=box.SIMPLE_HEAD, header_style="dim"
    )
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading in ("redundancy", "") else "right")
    shown = list(planned.finals[: asked.best])
    shown += [one for one in (planned.recommended, planned.sync) if one is not None and one not in shown]
    for one in shown:
        found.add_row(*_row(one, planned, asked.limits), style="bold" if one is planned.recommended else None)
    return found


def _row(one: CandidateOutcome, planned: Plan, limits: PlanLimits) -> list[str]:
    figures, candidate = one.figures, one.candidate
    bounds, idle = figures.bounds, figures.idle
    proven = bounds.asynchronous if candidate.async_ratio else bounds.sync
    notes = [*one.marks(limits)]
    notes += ["synchronous"] if one is planned.sync else []
    notes += ["<- take"] if one is planned.recommended else []
    return [
        describe_split(candidate),
        f"{candidate.async_ratio:g}",
        f"{figures.step_seconds:,.4g}",
        f"{one.throughput:,.4g}",
        f"{one.throughput / planned.sync.throughput:.2f} x",
        f"{max(0.0, idle.engines):.0%}, {max(0.0, idle.learner):.0%}",
        f"{figures.staleness_mean:.2f}, {max(figures.staleness, default=0)}",
        f"{one.wasted:.1%}",
        f"{one.bias:+.1%} ± {one.bias_error:.1%}",
        f"{proven:,.4g}",
        f"{bounds.best_training_share:.0%}",
        describe_redundancy(candidate),
        ", ".join(notes),
    ]


def describe_split(candidate: Candidate) -> str:
    """Return the split of the GPUs in a planned configuration as text, such as "96:32" for 96 inference engines and 32
    GPUs for training.
    """
    if candidate.colocated:
        return f"{candidate.learner_gpus:g} in turns"
    return f"{candidate.engines}:{candidate.learner_gpus:g}"


def describe_redundancy(candidate: Candidate) -> str:
    """Return text about the redundant work in a planned configuration: the groups of responses that it generates beyond
    a batch, and how it treats slow groups.
    """
    parts = [f"+{candidate.redundant_groups} groups"] if candidate.redundant_groups else []
    parts += [f"+{candidate.redundant_responses} responses"] if candidate.redundant_responses else []
    parts += ["tail batching"] if candidate.tail_batching else []
    parts += [f"ahead {candidate.max_batches_ahead:g}"] if candidate.max_batches_ahead is not None else []
    plain = not candidate.redundant_groups and not candidate.tail_batching
    parts += ["drops at the bound"] if plain and candidate.drops else []
    return ", ".join(parts)


def describe_plan(planned: Plan, asked: PlanRequest, seconds: float) -> Iterator[str]:
    """Yield sentences about the recommended plan: the reasons for the choice, and what the search does not show."""
    limits = asked.limits
    yield _describe_choice(planned, asked)
    fastest = planned.finals[0]
    if planned.best is not None and fastest.throughput > planned.best.throughput:
        yield (
            f"The fastest, {describe_split(fastest.candidate)} at alpha = {fastest.candidate.async_ratio:g} "
            f"({fastest.throughput / planned.sync.throughput:.2f} x), is {' and '.join(fastest.marks(limits))}."
        )
    taken = planned.recommended
    if taken is not None and planned.wider is not None:
        yield _describe_wider(taken, planned.wider)
    if taken is not None and 2.0 * taken.bias_error > limits.bias:
        yield (
            f"Its length bias is only known to ± {2.0 * taken.bias_error:.1%}, which is more than the limit"
            f"{': repeat without --quick.' if asked.quick else '.'}"
        )
    simulated = ", ".join(f"{alpha:g}" for alpha in planned.alphas)
    yield (
        f"{planned.simulations} simulations of {planned.trajectories:,} trajectories in {format_duration(seconds)}; "
        f"alpha = {simulated} were simulated, those in the table again for {planned.sync.versions} versions."
    )
    if not planned.settled and planned.alphas[-1] < asked.largest:
        yield f"The simulations were used up before alpha = {asked.largest:g}; larger alphas may be faster."
    if planned.settled:
        last = max((one for one in planned.finals), key=lambda one: one.candidate.async_ratio)
        limit = last.figures.bounds.conserving
        yield (
            f"Larger alphas were not simulated: no schedule on {asked.gpus} GPUs is below {limit:,.4g} s a step, and "
            f"alpha = {last.candidate.async_ratio:g} came within {TOLERANCE:.0%} of that in a first simulation."
        )
    yield (
        "Idle: engines, learner. Staleness: mean, largest. "
        f"Length bias is that after the warm-up, with its standard error. biased: over {limits.bias:.1%} either way by "
        f"two of these; wasteful: over {limits.waste:.0%} of the tokens; neither is recommended. Prop. 2: the longest "
        "step that this alpha can have, with beta* of the GPUs for training."
    )


def _describe_choice(planned: Plan, asked: PlanRequest) -> str:
    one, best = planned.recommended, planned.best
    if one is None or best is None:
        return (
            "Nothing is recommended: every candidate is biased or wasteful. Take one knowingly, or raise --max-bias or "
            "--max-waste."
        )
    candidate, gain = one.candidate, one.throughput / planned.sync.throughput
    turns = f"all {asked.gpus} GPUs in turns"
    divided = f"{candidate.engines} engines and {candidate.learner_gpus:g} GPUs for training"
    extra = describe_redundancy(candidate)
    return (
        f"Take alpha = {candidate.async_ratio:g} with {turns if candidate.colocated else divided}"
        f"{' (' + extra + ')' if extra else ''}: the smallest alpha within {TOLERANCE:.0%} of the best throughput "
        f"that keeps the limits ({best.throughput:,.4g} trajectories/s at alpha = {best.candidate.async_ratio:g}), "
        f"{gain:.2f} x the synchronous mode on the same {asked.gpus} GPUs."
    )


def _describe_wider(taken: CandidateOutcome, wider: CandidateOutcome) -> str:
    """Return a sentence that says how much faster training would be with a larger limit on the age of samples
    (alpha).
    """
    return (
        f"A wider bound would pay: alpha = {wider.candidate.async_ratio:g} with rollout.max_batches_ahead = "
        f"{wider.candidate.lead:g} takes {wider.figures.step_seconds:,.4g} s a step instead of "
        f"{taken.figures.step_seconds:,.4g}, at a mean staleness of {wider.figures.staleness_mean:.2f} instead of "
        f"{taken.figures.staleness_mean:.2f}; single responses get up to "
        f"{max(wider.figures.staleness, default=0)} versions old."
    )


# --- files ---------------------------------------------------------------------------------------------------


def _write_files(
    one: CandidateOutcome, config: RunConfig, hardware: Hardware, asked: PlanRequest, console: Console
) -> None:
    """Write the recipe and the hardware file of a plan. A comment at the top of each file describes the plan."""
    assert asked.write is not None
    recipe, divided = one.candidate.config(config, hardware), one.candidate.hardware(hardware)
    divided = divided.model_copy(update={"title": f"{config.name}, {asked.gpus} GPUs, {describe_split(one.candidate)}"})
    made = (
        f"# Planned for {asked.gpus} GPUs, rollout and training {describe_split(one.candidate)}; simulated step "
        f"{one.figures.step_seconds:,.4g} s over {one.versions} versions.\n"
    )
    changes = one.candidate.changes(config, hardware)
    changed = "".join(f"# changed: {key} = {json.dumps(value)}\n" for key, value in changes.items())
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    asked.write.write_text(f"{made}{changed}\n{rewrite_toml(EARLIER.sub('', asked.text), tree)}")
    tree = divided.model_dump(mode="json", exclude_unset=True)
    asked.hardware_file.write_text(f"{made}\n{rewrite_toml(EARLIER.sub('', asked.hardware_text), tree)}")
    console.print(f"recipe in {asked.write}, hardware in {asked.hardware_file}; simulate them with:", soft_wrap=True)
    command = f"rollflow plan {asked.write} --hardware {asked.hardware_file} --versions {one.versions}"
    console.print(f"  {command}", soft_wrap=True)


def plan_to_json(
    planned: Plan, config: RunConfig, hardware: Hardware, limits: PlanLimits, prices: Prices | None = None
) -> dict[str, Any]:
    """Return the complete result of a search for the best plan as a JSON object."""

    def one(outcome: CandidateOutcome) -> dict[str, Any]:
        return {
            "candidate": asdict(outcome.candidate),
            "changes": outcome.candidate.changes(config, hardware),
            "versions": outcome.versions,
            "speed_up": outcome.throughput / planned.sync.throughput,
            "settled_bias": outcome.bias,
            "settled_bias_error": outcome.bias_error,
            "wasted": outcome.wasted,
            "marks": outcome.marks(limits),
            "figures": as_json(outcome.figures),
            **({"cost": asdict(cost_of(outcome, prices, config, hardware))} if prices else {}),
        }

    return {
        "recommended": one(planned.recommended) if planned.recommended else None,
        "best": one(planned.best) if planned.best else None,
        "synchronous": one(planned.sync),
        "finals": [one(outcome) for outcome in planned.finals],
        "limits": asdict(limits),
        "alphas": planned.alphas,
        "settled": planned.settled,
        "simulations": planned.simulations,
        "trajectories": planned.trajectories,
    }
