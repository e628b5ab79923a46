"""A simulation's timeline as a picture: one row per engine (or a heat map of many), rewards, learner, updates.

Dark is busy; what stays white is a bubble.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.simulation.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = 64  # engines that get a row of their own
LEARNER = ("#c2410c", "#fb923c")
UPDATE = "#7c3aed"
REWARD = "#15803d"


def engine_rows(timeline: Timeline, rows: int = ROWS) -> NDArray[np.float32]:
    """(rows, bins): engines' occupancy; means of neighbours where there are more engines than rows."""
    engines = timeline.engines
    if len(engines) <= rows:
        return engines
    return np.stack([part.mean(axis=0) for part in np.array_split(engines, rows)])


def draw_png(timeline: Timeline, title: str, path: Path) -> None:
    """Draw to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = engine_rows(timeline)
    height = min(6.0, max(1.0, 0.22 * len(rows)))
    sizes = {"height_ratios": [height, 0.8, 0.7, 0.8], "hspace": 0.12}
    figure, axes = plt.subplots(4, 1, figsize=(14, height + 3.4), sharex=True, gridspec_kw=sizes)
    _engines(figure, axes[0], timeline, rows)
    _learner(axes[1], timeline)
    _rewards(axes[2], timeline)
    _occupancy(axes[3], timeline)
    for axis in axes:
        _updates(axis, timeline)
        axis.set_xlim(0, timeline.seconds)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(title, loc="left", fontsize=12)
    axes[-1].set_xlabel("virtual seconds (violet lines: the engines take a new version)")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _engines(figure: Any, axis: Axes, timeline: Timeline, rows: NDArray[np.float32]) -> None:
    extent = (0.0, timeline.seconds, len(rows) - 0.5, -0.5)
    image = axis.imshow(rows, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    many = len(timeline.engines) > len(rows)
    count = f"{len(timeline.engines)} engine" + "s" * (len(timeline.engines) > 1)
    axis.set_ylabel(count + (f"\nin {len(rows)} rows" if many else ""))
    axis.set_yticks([] if many or len(rows) > 16 else range(len(rows)))
    for above in range(len(rows) - 1) if len(rows) <= 32 else ():
        axis.axhline(above + 0.5, color="white", linewidth=0.8)
    box = axis.inset_axes((0.86, 1.02, 0.14, 0.16 / max(1.0, rows.shape[0] * 0.22)))
    bar = figure.colorbar(image, cax=box, orientation="horizontal", ticks=[0, 1])
    bar.ax.xaxis.set_ticks_position("top")
    bar.ax.set_xticklabels(["idle", f"{timeline.slots} slots"], fontsize=8)


def _learner(axis: Axes, timeline: Timeline) -> None:
    """A bar per train step; neighbours in two shades, so that they can be told apart."""
    for step in timeline.steps:
        axis.broken_barh([(step.began, step.seconds)], (0, 1), color=LEARNER[step.version % 2])
        if step.seconds > timeline.seconds / 40:
            middle = step.began + step.seconds / 2
            axis.text(middle, 0.5, f"v{step.version}", ha="center", va="center", fontsize=7, color="white")
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.set_ylabel("learner", rotation=0, ha="right", va="center")


def _rewards(axis: Axes, timeline: Timeline) -> None:
    axis.stairs(timeline.rewards, _edges(timeline), fill=True, color=REWARD, alpha=0.8, linewidth=0)
    axis.set_ylim(0, max(1.0, float(timeline.rewards.max()) * 1.1))
    axis.set_ylabel("verdicts\nunder way", rotation=0, ha="right", va="center")


def _occupancy(axis: Axes, timeline: Timeline) -> None:
    busy = timeline.engines.mean(axis=0) * 100
    axis.stairs(busy, _edges(timeline), fill=True, color="#1d4ed8", alpha=0.7, linewidth=0)
    axis.set_ylim(0, 100)
    axis.set_yticks([0, 50, 100])
    axis.set_ylabel("slots\nbusy, %", rotation=0, ha="right", va="center")


def _edges(timeline: Timeline) -> NDArray[np.float64]:
    return np.linspace(0.0, timeline.seconds, len(timeline.rewards) + 1)


def _updates(axis: Axes, timeline: Timeline) -> None:
    """A pause as a band where it can be seen, as a line where it is too short."""
    for update in timeline.updates:
        axis.axvspan(update.began, update.ended, color=UPDATE, alpha=0.25, linewidth=0)
        axis.axvline(update.ended, color=UPDATE, alpha=0.6, linewidth=0.7)
