"""Scores a share of a run's responses a second time, and counts the verdicts that differ.

    requests --> scorer --> first verdicts --> their callers
                   ^               |
                   +---- a share --+   one at a time, while no response waits for its first verdict

- A second verdict changes no score, and is never taken from a cache.
- For a second verdict, adaptive deadlines are at their maximum. A response whose program an adaptive deadline ended is
  not judged again.
- A verdict *flips* if only one of the two verdicts is "correct", or if their values differ by more than `TOLERANCE`.
- A second verdict waits until no response waits for its first verdict, but at most `PATIENCE_SECONDS`.
- A second verdict is not counted if it is "unjudged", or if it comes from another version of the scorer than the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollflow.storage.errors import RollflowError
from rollflow.storage.records import Outcome
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage

MOST_WAITING = 64  # largest number of responses that wait for a second verdict
PATIENCE_SECONDS = 10.0
TOLERANCE = 0.02  # largest difference between verdicts that count as equal; relative for values above 1


class SecondVerdictScorer(Scorer):
    """Wraps a scorer, and judges a share of the responses again."""

    def __init__(
        self, scorer: Scorer, share: float, counts: SecondVerdictCounts, deadline_part: str | None = None
    ) -> None:
        """Wrap `scorer`; `share` is the share of responses that are judged again, and `counts` counts the second
        verdicts.

        A score with the part `deadline_part` was decided by an adaptive deadline.
        """
        self._scorer, self._share, self._counts, self._deadline_part = scorer, share, counts, deadline_part
        self.slots = scorer.slots
        self._waiting: deque[tuple[ScoreRequest, Score]] = deque(maxlen=MOST_WAITING)
        self._pending = 0  # number of responses that wait for their first verdict
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._second = ScorerUsage()  # second verdicts, which the wrapped scorer counts like first verdicts

    @property
    def usage(self) -> ScorerUsage:  # type: ignore[override]  # the counters of the inner scorer
        """The counters of the wrapped scorer, without second verdicts. Only the busy time includes second verdicts."""
        usage = self._scorer.usage
        first, late = usage.scored - self._second.scored, usage.timeouts - self._second.timeouts
        return ScorerUsage(first, late, usage.busy_seconds)

    async def start(self) -> None:
        """Start the scorer, and the asyncio task that asks for second verdicts."""
        await self._scorer.start()
        self._task = asyncio.create_task(self._judge_again())

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score the responses in `requests`; a random share of the responses is judged again later."""
        futures = self._scorer.submit(requests)
        self._pending += len(futures)
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(functools.partial(self._note_first, request))
        return futures

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the scorer.

        Raises:
            ConfigError: the scorer can score no response at all.
        """
        try:
            await self._scorer.serve(finished)
        finally:
            await self._end_task()

    async def close(self) -> None:
        """Close the scorer, without judging the waiting responses again."""
        await self._end_task()
        await self._scorer.close()

    async def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note_first(self, request: ScoreRequest, future: asyncio.Future[Score]) -> None:
        self._pending -= 1
        if not future.cancelled() and future.exception() is None:
            score = future.result()
            can_differ = score.outcome is not Outcome.UNJUDGED and self._deadline_part not in score.parts
            if can_differ and random.random() < self._share:
                self._waiting.append((request, score))
        self._news.set()

    async def _judge_again(self) -> None:
        """Ask for second verdicts, one after another, until the scorer fails."""
        while True:
            await self._wait_turn()
            request, first = self._waiting.popleft()
            [future] = self._scorer.submit([replace(request, adapts=False, uses_cache=False)])
            try:
                second = await future
            except RollflowError:  # `serve` raises the error
                return
            self._second.scored += 1
            self._second.timeouts += second.outcome is Outcome.TIMEOUT
            if second.outcome is not Outcome.UNJUDGED and second.version == first.version:
                self._counts.add(second.version, is_flip=is_flip(first, second))

    async def _wait_turn(self) -> None:
        """Wait for a response to judge again, and then until no response waits for its first verdict."""
        while not self._waiting:
            await self._wait_news()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self._pending:
                    await self._wait_news()

    async def _wait_news(self) -> None:
        self._news.clear()
        await self._news.wait()


def is_flip(first: Score, second: Score) -> bool:
    """Return whether two verdicts on the same response differ in the outcome "correct", in value, or in the value of a
    token.
    """
    was_correct, is_correct = (one.outcome is Outcome.CORRECT for one in (first, second))
    if was_correct != is_correct or len(first.token_values) != len(second.token_values):
        return True
    before, now = (np.array([one.value, *one.token_values], np.float64) for one in (first, second))
    differ = np.abs(before - now) > TOLERANCE * np.maximum(1.0, np.abs(before))
    return bool((differ | (np.isnan(before) != np.isnan(now))).any())
