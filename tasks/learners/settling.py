"""All ranks settle together: a step changes what is stored once the first rank says that it may, on no rank before.

    first rank: settle() ...... wait ...... wait ...... go on, or stop
    any other:                  hears it ........................ and does so

- What the first rank's `settle` raises ends the step on all ranks alike (`Stopped`), and they are as they were.
- A slow store is no hang: while it is waited for, the first rank says so again and again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum

import torch

from rollflow.tasks.learners.base import Settle
from rollflow.tasks.learners.gloo_ranks import GlooRanks

TIMES = 4  # that it is said within the time that ranks wait for each other


class Word(IntEnum):
    """What the first rank says."""

    WAIT = 0
    GO_ON = 1
    STOP = 2


class Stopped(Exception):
    """The step ends, and nothing stored is changed: of the `error` that the first rank knows."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(str(error))
        self.error = error


def settled(ranks: GlooRanks, settle: Settle) -> None:
    """On the first rank: `settle`, and tell the others."""
    with ThreadPoolExecutor(1, "settling") as thread:
        job = thread.submit(settle)
        while wait([job], ranks.seconds / TIMES).not_done:
            _say(ranks, Word.WAIT)
    error = job.exception()
    _say(ranks, Word.GO_ON if error is None else Word.STOP)
    if error is not None:
        raise Stopped(error)


def told(ranks: GlooRanks) -> None:
    """On any other: wait for what the first one says."""
    while (word := _say(ranks)) == Word.WAIT:
        pass
    if word == Word.STOP:
        raise Stopped


def _say(ranks: GlooRanks, word: Word = Word.WAIT) -> Word:
    """What the first rank gives here, on all of them."""
    found = torch.tensor([word])
    ranks.from_first(found)
    return Word(int(found))
