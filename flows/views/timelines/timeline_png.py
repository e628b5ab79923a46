"""Draws a simulation's timeline as a PNG picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollflow.flows.views.timelines.timeline import BUSY, LEARNER, UPDATE, Drawing, TimeCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = 64  # Largest number of rows in the picture. A row is one inference engine or the mean of neighbouring engines.


def draw_png(drawing: Drawing, path: Path) -> None:
    """Draw the timeline to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = min(6.0, max(1.0, 0.22 * len(drawing.rows_RB)))
    ratios = [height, 0.8, *(0.75 for _ in drawing.curves)]
    sizes = {"height_ratios": ratios, "hspace": 0.12}
    figure, axes = plt.subplots(len(ratios), 1, figsize=(14, height + 3.4), sharex=True, gridspec_kw=sizes)
    _draw_engines(figure, axes[0], drawing)
    _draw_learner(axes[1], drawing)
    for axis, curve in zip(axes[2:], drawing.curves, strict=True):
        _draw_curve(axis, curve, drawing.seconds)
    for axis in axes:
        _draw_updates(axis, drawing)
        axis.set_xlim(0, drawing.seconds)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(drawing.title, loc="left", fontsize=12)
    axes[-1].set_xlabel("virtual seconds (violet lines: the engines load a new version)")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _draw_engines(figure: Any, axis: Axes, drawing: Drawing) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours, count = LinearSegmentedColormap.from_list("busy", BUSY), len(drawing.rows_RB)
    extent = (0.0, drawing.seconds, count - 0.5, -0.5)
    image = axis.imshow(
        drawing.rows_RB, aspect="auto", cmap=colours, vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    axis.set_ylabel(drawing.label)
    axis.set_yticks([] if count < drawing.engines or count > 16 else range(count))
    for above in range(count - 1) if count <= 32 else ():
        axis.axhline(above + 0.5, color="white", linewidth=0.8)
    box = axis.inset_axes((0.86, 1.02, 0.14, 0.16 / max(1.0, count * 0.22)))
    bar = figure.colorbar(image, cax=box, orientation="horizontal", ticks=[0, 1])
    bar.ax.xaxis.set_ticks_position("top")
    bar.ax.set_xticklabels(["idle", f"{drawing.slots} slots"], fontsize=8)


def _draw_learner(axis: Axes, drawing: Drawing) -> None:
    for step in drawing.steps:
        axis.broken_barh([(step.began, step.seconds)], (0, 1), color=LEARNER[step.version % 2])
        if step.seconds > drawing.seconds / 40:
            middle = step.began + step.seconds / 2
            axis.text(middle, 0.5, f"v{step.version}", ha="center", va="center", fontsize=7, color="white")
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.set_ylabel("learner", rotation=0, ha="right", va="center")


def _draw_curve(axis: Axes, curve: TimeCurve, seconds: float) -> None:
    edges = np.linspace(0.0, seconds, len(curve.values_B) + 1)
    axis.stairs(curve.values_B, edges, fill=True, color=curve.colour, linewidth=0)
    axis.set_ylim(0, curve.top)
    axis.set_ylabel(curve.label, rotation=0, ha="right", va="center")


def _draw_updates(axis: Axes, drawing: Drawing) -> None:
    """Draw each weight update as a band. A line marks the update's end, because the band may be too narrow to see."""
    for update in drawing.updates:
        axis.axvspan(update.began, update.ended, color=UPDATE, alpha=0.25, linewidth=0)
        axis.axvline(update.ended, color=UPDATE, alpha=0.6, linewidth=0.7)
