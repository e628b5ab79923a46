"""Writes a comparison of runs as one HTML file, which loads nothing, runs no script and works with a screen reader.
Each chart is an SVG picture with a description. A curve is thinned to at most `SHOWN` points, so that the page of a
long run stays small.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jinja2
import numpy as np

from rollflow.flows.views.compare import BY_DOMAIN, ComparedRun, Numbers, VersionCurve, diff_configs, group_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Axis = Literal["versions", "tokens", "seconds"]
SHOWN = 120
# Each style has its own dash pattern, so that curves can be told apart without colours.
STYLES = (
    ("#0b5fa5", ""),
    ("#b3470b", "6 2"),
    ("#0a7a55", "2 2"),
    ("#8f3a84", "8 2 2 2"),
    ("#5b5b5b", "4 4"),
    ("#7a5c00", "1 3"),
)
AXES: dict[Axis, str] = {"versions": "policy version", "tokens": "response tokens trained on", "seconds": "seconds"}
SECTIONS: dict[str, tuple[tuple[str, Axis], ...]] = {
    "Held-out accuracy": (("accuracy", "versions"), ("accuracy", "tokens"), ("accuracy", "seconds")),
    "Training reward": (("reward", "versions"), ("reward", "tokens"), ("reward", "seconds")),
    "Staleness, idle, waste": (("staleness", "versions"), ("idle", "versions"), ("waste", "versions")),
}
# Maps the name of a curve to its caption and to the label of its vertical axis.
SAID = {
    "accuracy": ("held-out accuracy", "accuracy"),
    "reward": ("training reward", "reward"),
    "staleness": ("mean staleness", "versions"),
    "idle": ("share of the time the learner waits", "share"),
    "waste": ("share of tokens not trained on", "share"),
}
TEMPLATE = Path(__file__).with_name("compare.html")


@dataclass(frozen=True, slots=True, eq=False)
class SeedBand:
    """The band of one recipe in a chart: the mean, the smallest and the largest value over runs with different
    seeds.
    """

    label: str
    colour: str
    dash: str
    x: Numbers
    middle: Numbers
    low: Numbers
    high: Numbers


def compare_page(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison of the runs as an HTML page."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    by_domain = dict.fromkeys(name for run in runs for name in run.curves if name.startswith(BY_DOMAIN))
    sections = {**SECTIONS, "Domains and reward parts": [(name, "versions") for name in by_domain]}
    figures = {title: [_draw_figure(runs, *chart) for chart in charts] for title, charts in sections.items()}
    return environment.from_string(TEMPLATE.read_text()).render(
        runs=runs,
        legend=[(_label_group(group), *STYLES[n % len(STYLES)]) for n, group in enumerate(group_seeds(runs))],
        sections={title: [figure for figure in drawn if figure] for title, drawn in figures.items()},
        differences=diff_configs(runs),
        result=_rows([run.result for run in runs]),
        cost=_rows([run.cost for run in runs]),
        idle=_rows([run.idle for run in runs]),
    )


def _rows(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "") for column in columns] for name in names}


def _label_group(group: Sequence[ComparedRun]) -> str:
    """Return the label of a group of runs that differ only in their seed. The label counts the different seeds, or the
    runs if two runs have the same seed.
    """
    own = {run.config.get("seed") for run in group}
    what = "seed" if len(own) == len(group) else "run"
    others = f" and {len(group) - 1} other {what}{'s' * (len(group) > 2)}" if len(group) > 1 else ""
    return f"{group[0].name}{others}"


def _draw_figure(runs: Sequence[ComparedRun], what: str, axis: Axis) -> dict[str, str] | None:
    """Draw the chart of the curve `what`, and return its picture, caption and description. Return None if no compared
    run has the curve.
    """
    bands = []
    for n, group in enumerate(group_seeds(runs)):
        if curves := [run.curves[what] for run in group if what in run.curves]:
            bands.append(_build_band(_label_group(group), *STYLES[n % len(STYLES)], curves, axis))
    if not bands:
        return None
    caption = f"{_describe_curve(what)[0]} by {AXES[axis]}"
    ends = "; ".join(f"{band.label}: {_describe_ends(band)}" for band in bands)
    picture = base64.b64encode(_draw(bands, what, axis)).decode()
    return {"caption": caption, "text": f"{caption}. {ends}.", "picture": picture}


def _describe_curve(what: str) -> tuple[str, str]:
    """Return the caption of a curve's chart, and the label of its vertical axis."""
    return SAID.get(what) or (what, "tokens" if what.startswith("response length") else "mean")


def _describe_ends(band: SeedBand) -> str:
    first, last = (f"{band.middle[end]:.3g} at {band.x[end]:,.0f}" for end in (0, -1))
    return f"{first}, {last}"


def _build_band(label: str, colour: str, dash: str, curves: Sequence[VersionCurve], axis: Axis) -> SeedBand:
    """Build the band of a recipe in a chart. The band ends where the shortest run of the recipe ends."""
    thinned = [_thin(getattr(curve, axis), curve.values) for curve in curves]
    if len(thinned) == 1:
        x, y = thinned[0]
        return SeedBand(label, colour, dash, x, y, y, y)
    first, last = max(x[0] for x, _ in thinned), min(x[-1] for x, _ in thinned)
    x = np.linspace(first, max(first, last), SHOWN)
    values_SX = np.stack([np.interp(x, places, values) for places, values in thinned])
    return SeedBand(label, colour, dash, x, values_SX.mean(0), values_SX.min(0), values_SX.max(0))


def _thin(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Reduce a curve to at most `SHOWN` points."""
    if len(x) <= SHOWN:
        return x, y
    parts = np.array_split(np.arange(len(x)), SHOWN)
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def _draw(bands: Sequence[SeedBand], what: str, axis: Axis) -> bytes:
    """Draw the bands of a chart and return the SVG picture. Text in the picture is stored as text and not as shapes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollflow", "font.size": 9}):
        figure = Figure(figsize=(4.2, 2.7), layout="constrained")
        axes = figure.subplots()
        for band in bands:
            _draw_band(axes, band, dots=what == "accuracy" and len(band.x) < SHOWN)
        axes.set(xlabel=AXES[axis], ylabel=_describe_curve(what)[1])
        axes.set_ylim(bottom=min([0.0, *(float(band.low.min()) for band in bands)]))
        if axis == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(written := io.BytesIO(), format="svg", metadata={"Date": None})
    return written.getvalue()


def _draw_band(axes: Axes, band: SeedBand, *, dots: bool) -> None:
    axes.fill_between(band.x, band.low, band.high, color=band.colour, alpha=0.18, linewidth=0)
    (line,) = axes.plot(band.x, band.middle, color=band.colour, linewidth=1.6)
    if dots:
        line.set(marker="o", markersize=2.5)
    if band.dash:
        line.set_dashes([float(part) for part in band.dash.split()])
