"""Prepares the drawing of a simulation's timeline, for a PNG picture (`timeline_png`) and for an HTML page
(`timeline_html`).

    engines     one row for each engine, or for several neighbours: dark is busy, white is idle
    learner     one bar for each train step
    curves      the number of verdicts in progress, and the share of all slots that is busy
    updates     one band across all rows, in which the engines load a new version

All times are virtual seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.simulation.records import Span
from rollflow.tasks.simulation.timeline import Timeline

# Colours of an engine's row, in equal steps from idle to all request slots busy.
BUSY = ("#ffffff", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
LEARNER = ("#c2410c", "#fb923c")  # Train steps alternate in colour, so that neighbouring steps can be told apart.
UPDATE = "#7c3aed"
REWARD = "#15803d"
SLOTS = "#3b82f6"


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """A filled curve over simulated time. `values_B` has one value from 0 to `top` for each of the B time bins."""

    label: str
    values_B: NDArray[np.float32]
    top: float
    colour: str
    digits: int
    sentence: str  # A sentence that explains a value of the curve. "{}" stands for the value.


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing of inference engines over simulated time, with R rows and B time bins. A row is one engine or the mean
    of neighbouring engines.
    """

    title: str
    bin_seconds: float
    engines: int
    slots: int
    rows_RB: NDArray[np.float32]  # Share of busy request slots (0 to 1) by row and time bin.
    steps: Sequence[Span]
    updates: Sequence[Span]
    curves: tuple[TimeCurve, ...]

    @property
    def seconds(self) -> float:
        """The length of the timeline in simulated seconds."""
        return self.bin_seconds * int(self.rows_RB.shape[1])

    @property
    def label(self) -> str:
        """The label of the rows that show inference engines."""
        count = f"{self.engines} engine" + "s" * (self.engines > 1)
        return count + (f"\nin {len(self.rows_RB)} rows" if len(self.rows_RB) < self.engines else "")


def build_drawing(timeline: Timeline, title: str, most_rows: int) -> Drawing:
    """Build the drawing of a timeline with at most `most_rows` rows. If there are more inference engines, a row is the
    mean of neighbouring engines.
    """
    engines = timeline.engines
    parts = np.array_split(engines, min(len(engines), most_rows))
    verdicts, busy = timeline.rewards, 100 * engines.mean(axis=0)
    most = max(1.0, 1.1 * float(verdicts.max()))
    curves = (
        TimeCurve("verdicts\nunder way", verdicts, most, REWARD, 1, "{} verdicts under way"),
        TimeCurve("slots\nbusy, %", busy, 100.0, SLOTS, 0, "all engines: {} % of the slots busy"),
    )
    return Drawing(
        title, timeline.bin_seconds, len(engines), timeline.slots, np.stack([part.mean(axis=0) for part in parts]),
        timeline.steps, timeline.updates, curves,
    )  # fmt: skip
