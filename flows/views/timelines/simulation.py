"""Implements `rollflow plan` without `--gpus`, which simulates how a recipe would run on other hardware and shows the
result.

The simulated times and counts are printed as a table. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollflow.flows.views.console import format_duration, staleness_bar
from rollflow.flows.views.timelines import timeline_html, timeline_png
from rollflow.flows.views.timelines.timeline import build_drawing
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.timeline import Timeline
from rollflow.tasks.simulation.world import SimulationResult, simulate

PLOTS = (".png", ".html")


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that `rollflow plan` writes in addition to the printed table."""

    plots: tuple[Path, ...] = ()
    json: Path | None = None

    @classmethod
    def of(cls, plot: Path | None, json: Path | None) -> Outputs:
        """Build the list of output files from the options `--plot` and `--json`. `plot` is the path of a .png or an
        .html file. If the path has no suffix, both files are written.

        Raises:
            ConfigError: `plot` has another suffix, or the folder of a file does not exist.
        """
        plots: tuple[Path, ...] = ()
        if plot is not None:
            plots = (plot,) if plot.suffix else tuple(plot.with_suffix(ending) for ending in PLOTS)
            if plots[0].suffix not in PLOTS:
                raise ConfigError(
                    f"--plot {str(plot)!r}: the name must end in .png or .html, or have no suffix for both; give "
                    "such a name"
                )
        for path in (*plots, *([json] if json else [])):
            if not path.parent.is_dir():
                raise ConfigError(
                    f"{str(path)!r} cannot be written, because the folder {str(path.parent)!r} does not exist; "
                    "create the folder"
                )
        return cls(plots, json)


def run_simulation(
    config: RunConfig, hardware: Hardware, versions: int | None, outputs: Outputs, *, console: Console | None = None
) -> SimulationResult:
    """Simulate the recipe, print the simulated times and counts as a table, and write the files in `outputs`."""
    console = console or Console(highlight=False)
    with _show_progress(versions or config.versions) as watch:
        simulated = simulate(config, hardware, versions=versions, timeline=bool(outputs.plots), watch=watch)
    console.print(build_table(simulated.figures, config, hardware))
    if simulated.timeline is not None:
        title = f"{config.name}: {hardware.title or 'simulated'}, async_ratio {config.async_ratio:g}"
        for path in outputs.plots:
            _draw(simulated.timeline, title, path)
            console.print(f"timeline in {path}", soft_wrap=True)
    if outputs.json is not None:
        outputs.json.write_text(json.dumps(as_json(simulated.figures), indent=2))
        console.print(f"figures in {outputs.json}", soft_wrap=True)
    return simulated


def as_json(figures: Figures) -> dict[str, Any]:
    """Return all results of a simulation as a JSON object."""
    bias = {"mean_difference": figures.bias.mean_difference, "p99_difference": figures.bias.p99_difference}
    found = asdict(figures)
    return {**found, "staleness_mean": figures.staleness_mean, "bias": {**found["bias"], **bias}}


def _draw(timeline: Timeline, title: str, path: Path) -> None:
    if path.suffix == ".png":
        timeline_png.draw_png(build_drawing(timeline, title, timeline_png.ROWS), path)
    else:
        timeline_html.draw_html(build_drawing(timeline, title, timeline_html.ROWS), path)


@contextmanager
def _show_progress(versions: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar until the simulation ends, if standard error is a terminal."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("versions"))
    console = Console(file=sys.stderr)
    quiet = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("versions", total=versions)
        yield lambda version: bar.update(task, completed=version)


# --- the table -----------------------------------------------------------------------------------------------


def build_table(figures: Figures, config: RunConfig, hardware: Hardware) -> Panel:
    """Build the table of a simulation's times and counts."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for label, value in [*_time_rows(figures), *_fate_rows(figures, config), *_bound_rows(figures)]:
        rows.add_row(label, value)
    title = Text.assemble((" simulated ", "bold"), (config.name, "cyan"), f" on {hardware.title or 'hardware'} ")
    return Panel(rows, title=title, title_align="left", border_style="cyan", expand=False)


def _time_rows(figures: Figures) -> list[tuple[str, Any]]:
    idle = figures.idle
    rows = [
        (
            "versions",
            f"{figures.versions} in {format_duration(figures.seconds)}; times without the first {figures.warm_up}",
        ),
        ("step", Text.assemble((f"{figures.step_seconds:,.4g} s", "bold"), f"  (median {figures.step_median:,.4g} s)")),
        (
            "throughput",
            f"{figures.trajectories_per_second:,.4g} trajectories/s, {figures.tokens_per_second:,.0f} tokens/s trained",
        ),
        ("idle", f"engines {_share(idle.engines)}   reward {_share(idle.reward)}   learner {_share(idle.learner)}"),
        ("empty slots", _share(idle.slots)),
        ("updates", f"{_share(figures.update_share)} of the time"),
    ]
    if figures.shares is not None:
        shares = asdict(figures.shares)
        rows.append(("of a step", "   ".join(f"{name} {_share(value)}" for name, value in shares.items())))
    return rows


def _fate_rows(figures: Figures, config: RunConfig) -> list[tuple[str, Any]]:
    tokens, bias = figures.tokens, figures.bias
    bound = Text(f"  (mean {figures.staleness_mean:.2f}, bound {config.async_ratio:g})", style="dim")
    wasted = ", ".join(f"{reason} {_of(count, tokens.sampled)}" for reason, count in tokens.wasted.items())
    rows = [
        ("staleness", staleness_bar(figures.staleness, 24) + bound),
        ("tokens", f"{tokens.sampled:,} sampled: trained {_of(tokens.trained, tokens.sampled)}, "
                   f"unfinished {_of(tokens.unfinished, tokens.sampled)}"),
        ("wasted", wasted or "nothing"),
        ("length bias", f"mean {bias.trained_mean:,.4g} of {bias.population_mean:,.4g} ({bias.mean_difference:+.2%}), "
                        f"p99 {bias.trained_p99:,.0f} of {bias.population_p99:,.0f} ({bias.p99_difference:+.2%}), "
                        f"{bias.trained:,} responses"),
    ]  # fmt: skip
    if figures.evaluations:
        rows.append(("evaluations", f"{figures.evaluations} on a borrowed engine, {tokens.evaluated:,} tokens besides"))
    if figures.deaths or figures.restarted:
        rows.append(
            (
                "faults",
                f"{figures.deaths} engines died, {figures.taken_over} responses went on elsewhere, "
                f"{figures.restarted} began again",
            )
        )
    return rows


def _bound_rows(figures: Figures) -> list[tuple[str, Any]]:
    bounds, step = figures.bounds, figures.step_seconds
    asynchronous = "synchronous" if figures.shares is not None else "asynchronous"
    proven = bounds.sync if figures.shares is not None else bounds.asynchronous
    limits = (
        f"no schedule below {bounds.conserving_split:,.4g} s with this split (step is "
        f"{step / bounds.conserving_split:.2f} x that), {bounds.conserving:,.4g} s with any split, "
        f"{figures.freshness_limit:,.4g} s at this alpha with any number of engines"
    )
    guarantee = (
        f"{asynchronous} step at most {proven:,.4g} s with {_share(bounds.best_training_share)} of the GPUs for "
        f"training; asynchrony gains at most {bounds.largest_gain:.2f} x"
    )
    if not bounds.guaranteed:
        guarantee = "says nothing of engines that read their KV cache, fill it, or compute prompts by their length"
    return [("limits", limits), ("Proposition 2", guarantee)]


def _share(value: float) -> str:
    return f"{max(0.0, value):.1%}"


def _of(count: int, total: int) -> str:
    return _share(count / max(1, total))
