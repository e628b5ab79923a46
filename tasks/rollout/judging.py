"""Judges a response again while nobody can judge it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score, ScoreRequest

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries; each pause is twice as long as the previous one

Judge = Callable[[ScoreRequest], Awaitable[Score]]


def judge_repeatedly(judge: Judge, tries: int) -> Judge:
    """Return a function that judges a response up to `tries` times while its outcome is "unjudged"; 0 means once."""

    async def judge_again(request: ScoreRequest) -> Score:
        score, pause = await judge(request), FIRST_PAUSE
        for _ in range(tries - 1):
            if score.outcome is not Outcome.UNJUDGED:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            score = await judge(request)
        return score

    return judge_again
