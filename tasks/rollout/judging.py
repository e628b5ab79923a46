"""Tries several times to score a response whose judge cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score, ScoreRequest

# seconds between two attempts to judge; each pause is twice as long as the previous pause
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0

Judge = Callable[[ScoreRequest], Awaitable[Score]]


def judge_repeatedly(judge: Judge, tries: int, over: asyncio.Event | None = None) -> Judge:
    """Return a function that tries up to `tries` times to judge a response; 0 means once.

    Once the event `over` is set, the function stops trying, because nobody needs the score any more.
    """
    over = over or asyncio.Event()

    async def judge_again(request: ScoreRequest) -> Score:
        score, pause = await judge(request), FIRST_PAUSE
        for _ in range(tries - 1):
            if score.outcome is not Outcome.UNJUDGED or await _wait(over, pause):
                break
            pause = min(2 * pause, LONGEST_PAUSE)
            score = await judge(request)
        return score

    return judge_again


class ScoreQueue:
    """Counts the responses that wait for a score. A response waits until its last try to be judged has ended."""

    def __init__(self, most: int | None = None, on_room: Callable[[], None] = lambda: None) -> None:
        """Call `on_room` whenever fewer than `most` responses wait for a score; `most` may be None."""
        self._most, self._on_room = most, on_room
        self.waiting = 0

    def count(self, judge: Judge) -> Judge:
        """Return a function that has a response scored by `judge`, and counts the response meanwhile."""

        async def judge_counted(request: ScoreRequest) -> Score:
            self.waiting += 1
            try:
                return await judge(request)
            finally:
                self.waiting -= 1
                if self.waiting + 1 == self._most:
                    self._on_room()

        return judge_counted


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait at most `seconds` until the event is set; return whether the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
