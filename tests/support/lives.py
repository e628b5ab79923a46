"""Actors for tests of the code that restarts dead actors. Their processes import this module, so each import costs time
at each start.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from rollflow.storage.errors import Conflict, NotFinite, StoreFailed
from rollflow.storage.log.state import Deposed, Superseded
from rollflow.tasks.actors.statuses import RewardStatus

BUSY_SECONDS = 9.0


class Worker:
    """An actor whose behaviour after each start follows the next word in the file `lives`: "die", "full", "nan",
    "raise", "deposed", "hang", "work".

    A "busy" actor computes, and a "deaf" actor does nothing; both hold Python's global lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lives = folder / "lives"
        self.life, *left = lives.read_text().split()
        lives.write_text(" ".join(left or [self.life]))
        self.made = 0

    def run(self) -> str:
        if self.life == "die":
            time.sleep(0.5)
            os._exit(1)
        if self.life == "full":
            raise StoreFailed("the disk is full: free space, then resume the run")
        if self.life == "nan":
            raise NotFinite("version 3 is not trained: grad_norm of batch 2 is nan")
        if self.life == "raise":
            raise Conflict("somebody else published version 3")
        if self.life == "deposed":
            raise Deposed("this run has another worker now; this one stops")
        if self.life == "superseded":
            raise Superseded("a worker is claimed under the newest supervisor, which is another one")
        while self.life == "hang":
            time.sleep(0.1)
        if self.life == "deaf":
            ctypes.PyDLL(None).sleep(600)
        began = time.monotonic()
        while self.life == "busy" and time.monotonic() - began < BUSY_SECONDS:
            sum(range(10**8))
        for _ in range(20):
            time.sleep(0.1)
            self.made += 1
        return "done"

    def status(self) -> RewardStatus:
        return RewardStatus(scored=self.made, idle=time.monotonic())


class Joins:
    """A stand-in for the scheduler that accepts restarted engines."""

    def join(self, number: int) -> None:
        pass
