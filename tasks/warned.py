"""What an actor's process warns of, kept for its status: by Python's `logging` and `warnings`, whichever library it is.

Bounded: the same text, whatever its numbers, is kept once in `AGAIN_SECONDS`, and no more than `KEPT` in that time.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

KEPT = 20
AGAIN_SECONDS = 600.0
LOOK_SECONDS = 10.0  # between two looks for loggers that hand on nothing: some libraries have one
LENGTH = 500  # characters of a text


@dataclass(frozen=True, slots=True)
class Warned:
    """The `number`-th warning (from 1) of a process, which is an actor's."""

    actor: str
    process: str
    number: int
    text: str


class Warnings(logging.Handler):
    """Keeps the newest warnings of this process."""

    def __init__(self, actor: str) -> None:
        super().__init__(logging.WARNING)
        self._actor, self._process = actor, f"{socket.gethostname()}:{os.getpid()}"
        self._kept: deque[tuple[float, Warned]] = deque(maxlen=KEPT)
        self._seen: dict[str, float] = {}  # text without its numbers -> when it was kept
        self._number = self._left = 0
        self._looked = float("-inf")

    def read(self) -> Sequence[Warned]:
        """The newest; who has read them before tells them by their numbers."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self._attach()
        return [warned for _, warned in list(self._kept)]

    def _attach(self) -> None:
        """To the root, and to every logger whose records do not get there."""
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)  # a second time does nothing
        for logger in list(logging.Logger.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger) and not logger.propagate:
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, unless that would be one too many."""
        text, now = _text(record), time.monotonic()
        same = re.sub(r"\d+", "0", text)
        self._seen = {one: at for one, at in self._seen.items() if now - at < AGAIN_SECONDS}
        if same in self._seen:
            return
        if len(self._kept) == KEPT and now - self._kept[0][0] < AGAIN_SECONDS:
            self._left += 1
            return
        more, self._left = (f" (before it, {self._left} others were left out)" if self._left else ""), 0
        self._seen[same] = now
        self._number += 1
        self._kept.append((now, Warned(self._actor, self._process, self._number, text + more)))


@lru_cache
def warnings_of(actor: str) -> Warnings:
    """Those of this process, as `actor`."""
    return Warnings(actor)


def _text(record: logging.LogRecord) -> str:
    """The first line with anything in it, and the error's where it has one."""
    said = next((line.strip() for line in record.getMessage().splitlines() if line.strip()), record.name)
    error = record.exc_info[1] if record.exc_info else None
    return f"{said}: {error!r}"[:LENGTH] if error else said[:LENGTH]
