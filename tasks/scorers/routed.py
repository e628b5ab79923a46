"""A scorer that forwards each response to the scorer that the response's prompt names.

    requests --by name--> [reward]         its own queue, workers and deadline
                    `---> [rewards.math]   its own queue, workers and deadline

A response that is slow to score delays only responses with the same scorer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rollflow.storage.errors import ConfigError
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.config import name_section


class SeveralScorers(Scorer):
    """Starts, watches and closes scorers.

    A subclass implements `submit`, which chooses the scorer of a response.
    """

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


class RoutedScorer(SeveralScorers):
    """Several named scorers; each prompt names the scorer of its responses."""

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score these responses, each with the scorer that its request names.

        Raises:
            ConfigError: a request names a scorer that the run does not have.
        """
        if unknown := {request.scorer for request in requests} - self.scorers.keys():
            section = name_section(unknown.pop())
            raise ConfigError(
                f"{section}: a prompt names this scorer, but the config of the run has no such section; add it"
            )
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.scorer, []).append(place)
        found: dict[int, asyncio.Future[Score]] = {}
        for name, of_name in places.items():
            futures = self.scorers[name].submit([requests[place] for place in of_name])
            found |= zip(of_name, futures, strict=True)
        return [found[place] for place in range(len(requests))]
