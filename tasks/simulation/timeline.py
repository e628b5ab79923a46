"""Records the timeline of a simulation: how busy engines and scorers are over time, and when steps and updates run.

A timeline has at most `BINS` time bins, so that it needs little memory. If a simulation outgrows the time bins, pairs
of neighbouring bins are merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.simulation.records import Span

BINS = 960


@dataclass(frozen=True, slots=True)
class Timeline:
    """How busy each of E engines and the scorers were in each of B time bins of `bin_seconds`. `engines[e, b]` is the
    share of busy slots of engine e in time bin b; `rewards[b]` is the mean number of scores in progress."""

    bin_seconds: float
    engines: NDArray[np.float32]
    rewards: NDArray[np.float32]
    steps: Sequence[Span]
    updates: Sequence[Span]
    slots: int

    @property
    def seconds(self) -> float:
        """Length of the timeline in seconds."""
        return self.bin_seconds * len(self.rewards)


class Sampler:
    """Samples cumulative counters once per time bin."""

    def __init__(self, read: Callable[[], Sequence[float]], bin_seconds: float) -> None:
        self._read, self.bin_seconds = read, bin_seconds
        self._rows: list[NDArray[np.float32]] = []  # for each time bin, the growth of each counter

    async def run(self) -> None:
        """Sample the counters until the task is cancelled."""
        before = np.array(self._read())
        while True:
            await asyncio.sleep(self.bin_seconds)
            now = np.array(self._read())
            self._rows.append((now - before).astype(np.float32))
            before = now
            if len(self._rows) >= BINS:
                self._rows = [a + b for a, b in zip(self._rows[::2], self._rows[1::2], strict=True)]
                self.bin_seconds *= 2

    def growth(self) -> NDArray[np.float32]:
        """Compute the growth of each counter per second in each time bin, as an array (counters, bins)."""
        if not self._rows:
            return np.zeros((len(self._read()), 1), np.float32)
        found: NDArray[np.float32] = np.stack(self._rows, axis=1) / np.float32(self.bin_seconds)
        return found
