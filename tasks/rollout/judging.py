"""Scores responses, and tries again several times if the judge of a response cannot be reached.

While the judge of a scorer is unavailable, `Outages` delays new attempts, so that a run survives a long outage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score, ScoreRequest

# seconds between two attempts to judge; each pause is twice as long as the previous pause
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0

Judge = Callable[[ScoreRequest], Awaitable[Score]]


def judge_repeatedly(judge: Judge, tries: int, over: asyncio.Event | None = None) -> Judge:
    """Return a judge that tries up to `tries` times to score a response.

    Once the event `over` is set, the returned judge stops trying, because nobody needs the score any more.
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
    """Counts the responses that wait for a score. A response is counted until the last attempt to judge it has
    ended.
    """

    def __init__(self, most: int | None = None, on_room: Callable[[], None] = lambda: None) -> None:
        """Call `on_room` whenever the number of waiting responses falls below `most`; None means never."""
        self._most, self._on_room = most, on_room
        self.waiting = 0

    def count(self, judge: Judge) -> Judge:
        """Return a judge that calls `judge`, and counts the response as waiting during the call."""

        async def judge_counted(request: ScoreRequest) -> Score:
            self.waiting += 1
            try:
                return await judge(request)
            finally:
                self.waiting -= 1
                if self.waiting + 1 == self._most:
                    self._on_room()

        return judge_counted


class Outages:
    """Counts, for each scorer, the consecutive groups of responses that the scorer could not judge.

    Groups of responses that run at the same time count once, because one short outage affects all of them.
    """

    def __init__(self) -> None:
        self._in_a_row = Counter[str]()
        self._issued = Counter[str]()  # scorer -> number of started groups when an unjudged group was last counted
        self._paused = defaultdict[str, set[asyncio.Event]](set)  # scorer -> events that end the pauses of its groups
        self._is_over = False  # True once no discarded prompt is issued again

    def end(self, scorer: str) -> None:
        """Record that the scorer judged a group of responses, and end all pauses of the scorer."""
        self._in_a_row[scorer] = 0
        for over in self._paused[scorer]:
            over.set()

    def end_pauses(self) -> None:
        """End all pauses, now and later, because no prompt is issued again."""
        self._is_over = True
        for over in {over for paused in self._paused.values() for over in paused}:
            over.set()

    def count(self, scorer: str, number: int, issued: int) -> int:
        """Count the unjudged group `number`, and return the number of consecutive unjudged groups; `issued` groups have
        started so far.

        If the group ran at the same time as a counted unjudged group, the group is not counted, and 0 is returned.
        """
        if number <= self._issued[scorer]:
            return 0
        self._issued[scorer] = issued
        self._in_a_row[scorer] += 1
        return self._in_a_row[scorer]

    async def pause(self, scorer: str, over: asyncio.Event) -> None:
        """Wait before the prompt of an unjudged group is issued again, at most until `over` is set.

        The pause doubles with each consecutive unjudged group, up to `LONGEST_PAUSE` seconds.
        """
        if self._is_over or not (in_a_row := self._in_a_row[scorer]):
            return
        self._paused[scorer].add(over)
        await _wait(over, min(FIRST_PAUSE * 2 ** min(in_a_row, 10), LONGEST_PAUSE))
        self._paused[scorer].discard(over)


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait at most `seconds` until the event is set; return whether the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
