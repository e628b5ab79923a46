"""Adds the version of a scorer to its scores, for scorers without worker processes.

Worker processes report the version themselves, because they may load newer code than this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage


class VersionedScorer(Scorer):
    """Wraps a scorer, and sets the version of the scorer in each score."""

    def __init__(self, scorer: Scorer, version: str) -> None:
        self._scorer, self._version = scorer, version

    @property
    def usage(self) -> ScorerUsage:  # type: ignore[override]  # the counters of the inner scorer
        """The counters of the scorer."""
        return self._scorer.usage

    async def start(self) -> None:
        """Start the scorer."""
        await self._scorer.start()

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score the responses in `requests`. Cancelling a returned future also cancels the wrapped scorer's
        future.
        """
        return [self._add_version(future) for future in self._scorer.submit(requests)]

    def _add_version(self, future: asyncio.Future[Score]) -> asyncio.Future[Score]:
        versioned: asyncio.Future[Score] = asyncio.get_running_loop().create_future()

        def pass_on(done: asyncio.Future[Score]) -> None:
            if versioned.done():
                return
            if done.cancelled():
                versioned.cancel()
            elif error := done.exception():
                versioned.set_exception(error)
            else:
                versioned.set_result(replace(done.result(), version=self._version))

        future.add_done_callback(pass_on)
        versioned.add_done_callback(lambda one: future.cancel() if one.cancelled() else None)
        return versioned

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the scorer.

        Raises:
            ConfigError: the scorer can score no response at all.
        """
        await self._scorer.serve(finished)

    async def close(self) -> None:
        """Close the scorer."""
        await self._scorer.close()
