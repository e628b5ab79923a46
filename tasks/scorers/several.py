"""The base class of scorers that consist of other scorers, each with a queue, workers and a deadline of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollflow.tasks.scorers.base import Scorer, ScorerUsage


class SeveralScorers(Scorer):
    """Starts, watches and closes scorers. A subclass of `SeveralScorers` submits responses to the scorers."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self.scorers = dict(scorers)

    @property
    def usage(self) -> ScorerUsage:  # type: ignore[override]  # the sum is read only
        """The usage counters of all scorers, summed."""
        found = [scorer.usage for scorer in self.scorers.values()]
        return ScorerUsage(
            sum(usage.scored for usage in found),
            sum(usage.timeouts for usage in found),
            sum(usage.busy_seconds for usage in found),
        )

    async def start(self) -> None:
        """Start all scorers."""
        await asyncio.gather(*(scorer.start() for scorer in self.scorers.values()))

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close all scorers.

        Raises:
            ConfigError: one of the scorers can score no response at all.
        """
        serving = [asyncio.create_task(scorer.serve(finished)) for scorer in self.scorers.values()]
        try:
            done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in serving:
                task.cancel()
        for task in done:
            task.result()

    async def close(self) -> None:
        """Close all scorers."""
        await asyncio.gather(*(scorer.close() for scorer in self.scorers.values()))
