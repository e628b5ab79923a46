"""A barrier of all ranks in each train step: no rank changes a stored tensor before the previous policy version is
stored.

    first rank: settle() ...... WAIT ...... WAIT ...... GO_ON or STOP
    other rank:                 reads each message, and then goes on or stops

- If `settle` raises an error on the first rank, the train step ends on all ranks with `StepStopped`.
- While the first rank waits for a slow object store, it sends WAIT to the other ranks, so that they do not stop with a
  timeout.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum

import torch

from rollflow.tasks.learners.base import WaitForPublish
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks

TIMES = 4  # number of WAIT messages that the first rank sends in `train.rank_seconds` seconds


class BarrierMessage(IntEnum):
    """The messages that the first rank sends to the other ranks while they wait at the publish barrier."""

    WAIT = 0
    GO_ON = 1
    STOP = 2


class StepStopped(Exception):
    """Raised if a train step ends before it has changed a stored tensor. `error` is the cause, which is known only on
    the first rank."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(str(error))
        self.error = error


def wait_published(ranks: GlooRanks, settle: WaitForPublish) -> None:
    """Call `settle` on the first rank, and report the result to the other ranks. `settle` waits until the previous
    policy version is stored."""
    with ThreadPoolExecutor(1, "settling") as thread:
        job = thread.submit(settle)
        while wait([job], ranks.seconds / TIMES).not_done:
            _broadcast_word(ranks, BarrierMessage.WAIT)
    error = job.exception()
    _broadcast_word(ranks, BarrierMessage.GO_ON if error is None else BarrierMessage.STOP)
    if error is not None:
        raise StepStopped(error)


def follow_first_rank(ranks: GlooRanks) -> None:
    """Wait, on a rank other than the first, until the first rank allows the train step to continue."""
    while (word := _broadcast_word(ranks)) == BarrierMessage.WAIT:
        pass
    if word == BarrierMessage.STOP:
        raise StepStopped


def _broadcast_word(ranks: GlooRanks, word: BarrierMessage = BarrierMessage.WAIT) -> BarrierMessage:
    """Broadcast a message from the first rank to all ranks, and return the message."""
    found = torch.tensor([word])
    ranks.broadcast(found)
    return BarrierMessage(int(found))
