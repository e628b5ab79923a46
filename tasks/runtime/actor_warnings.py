"""What an actor's process warns of, kept for its status: by Python's `logging` and `warnings`, whichever library it is.

Bounded: the same text, whatever its numbers, is kept once in `AGAIN_SECONDS`, and no more than `KEPT` in that time.

    a process below an actor's --a datagram for each text that it keeps--> the actor's, which keeps it as its own

So both are bounded. Who sends waits for nobody: what finds no room is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

KEPT = 20
AGAIN_SECONDS = 600.0
LOOK_SECONDS = 10.0  # between two looks for loggers that hand on nothing: some libraries have one
LENGTH = 500  # characters of a text
_making = Lock()


@dataclass(frozen=True, slots=True)
class Warned:
    """The `number`-th warning (from 1) of a process, which is an actor's; `rank` where a further rank sent it."""

    actor: str
    process: str
    number: int
    text: str
    rank: int | None = None


class Warnings(logging.Handler):
    """Keeps the newest warnings of this process."""

    def __init__(self, actor: str, told: Callable[[Warned], None] = lambda warned: None) -> None:
        """`told` is called with each one that is kept."""
        super().__init__(logging.WARNING)
        self._told = told
        self._actor, self._process = actor, f"{socket.gethostname()}:{os.getpid()}"
        self._kept: deque[tuple[float, Warned]] = deque(maxlen=KEPT)
        self._seen: dict[str, float] = {}  # text without its numbers -> when it was kept
        self._number = self._left = 0
        self._looked = float("-inf")

    def read(self) -> Sequence[Warned]:
        """The newest; who has read them before tells them by their numbers."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self.attach()
        with self._locked():
            for who, rank, text in _heard():
                self._keep(f"{who}: {text}", rank)
        return [warned for _, warned in list(self._kept)]

    def attach(self) -> None:
        """To the root, and to every logger whose records do not get there."""
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)  # a second time does nothing
        for logger in list(logging.Logger.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger) and not logger.propagate:
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, unless that would be one too many."""
        self._keep(_text(record))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """As `logging` calls `emit`."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _keep(self, text: str, rank: int | None = None) -> None:
        same, now = re.sub(r"\d+", "0", text), time.monotonic()
        self._seen = {one: at for one, at in self._seen.items() if now - at < AGAIN_SECONDS}
        if same in self._seen:
            return
        if len(self._kept) == KEPT and now - self._kept[0][0] < AGAIN_SECONDS:
            self._left += 1
            return
        more, self._left = (f" (before it, {self._left} others were left out)" if self._left else ""), 0
        self._seen[same] = now
        self._number += 1
        warned = Warned(self._actor, self._process, self._number, text + more, rank)
        self._kept.append((now, warned))
        self._told(warned)


@lru_cache
def warnings_of(actor: str) -> Warnings:
    """Those of this process, as `actor`."""
    return Warnings(actor)


def ear() -> socket.socket:
    """What a process below this one is given, for `send_to`."""
    return _pair()[1]


def send_to(ear: socket.socket, who: str, rank: int | None = None) -> None:
    """From now on the process above this one hears what this one warns of, as `who`; to be called after the imports."""

    def send(warned: Warned) -> None:
        with contextlib.suppress(OSError):  # no room, or nobody
            ear.send(json.dumps((who, rank, warned.text)).encode(), socket.MSG_DONTWAIT)

    logging.basicConfig(format="%(message)s")  # its own output has them, as before
    Warnings(who, send).attach()


def _pair() -> tuple[socket.socket, socket.socket]:
    with _making:
        return _made()


@lru_cache
def _made() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for one in pair:
        atexit.register(one.close)
    return pair


def _heard() -> Iterator[tuple[str, int | None, str]]:
    """What was sent since the last look: who, its rank, its text. What `send_to` did not send is passed over."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data = _pair()[0].recv(2**16, socket.MSG_DONTWAIT)
            with contextlib.suppress(ValueError, TypeError):
                who, rank, text = json.loads(data)
                yield str(who), rank if isinstance(rank, int) else None, str(text)[:LENGTH]


def _text(record: logging.LogRecord) -> str:
    """The first line with anything in it, and the error's where it has one."""
    said = next((line.strip() for line in record.getMessage().splitlines() if line.strip()), record.name)
    error = record.exc_info[1] if record.exc_info else None
    return f"{said}: {error!r}"[:LENGTH] if error else said[:LENGTH]
