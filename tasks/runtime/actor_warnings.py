"""Collects the warnings of a Ray actor's process, from Python's `logging` and `warnings`, for the actor's status.

If several warnings within `AGAIN_SECONDS` differ only in numbers, only the first one is stored. At most `KEPT` warnings
of a process are stored within `AGAIN_SECONDS`. Reward workers and learner ranks send their warnings to the actor that
started them.

    child process of an actor --one datagram per text--> the actor's process

A child process never waits for the actor: a warning is lost if the socket has no room for it.
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
LOOK_SECONDS = 10.0  # seconds between two searches for loggers that do not propagate their records
LENGTH = 500  # largest number of characters of a warning's text
_making = Lock()


@dataclass(frozen=True, slots=True)
class ActorWarning:
    """A warning of a Ray actor.

    `number` counts the actor's warnings from 1, and `rank` is the learner rank that sent the warning, if any.
    """

    actor: str
    process: str
    number: int
    text: str
    rank: int | None = None


class Warnings(logging.Handler):
    """Logging handler that keeps the newest warnings of this process."""

    def __init__(self, actor: str, told: Callable[[ActorWarning], None] = lambda warned: None) -> None:
        """Store warnings under the name `actor`, and call `told` with each of them."""
        super().__init__(logging.WARNING)
        self._told = told
        self._actor, self._process = actor, f"{socket.gethostname()}:{os.getpid()}"
        self._kept: deque[tuple[float, ActorWarning]] = deque(maxlen=KEPT)
        self._seen: dict[str, float] = {}  # text of a warning without its numbers -> time at which the warning was kept
        self._number = self._left = 0
        self._looked = float("-inf")

    def read(self) -> Sequence[ActorWarning]:
        """Return the newest warnings of this process and its child processes."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self.attach()
        with self._lock():
            for who, rank, text in _receive():
                self._keep_text(f"{who}: {text}", rank)
        return [warned for _, warned in list(self._kept)]

    def attach(self) -> None:
        """Attach this handler to the root logger and to every logger that does not propagate its records."""
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)  # a second call of `addHandler` has no effect
        for logger in list(logging.Logger.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger) and not logger.propagate:
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store the text of a log record, unless the limits on the number of warnings are reached."""
        self._keep_text(_format_record(record))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Acquire the handler's lock during a `with` block, as `logging` does for `emit`."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _keep_text(self, text: str, rank: int | None = None) -> None:
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
        warned = ActorWarning(self._actor, self._process, self._number, text + more, rank)
        self._kept.append((now, warned))
        self._told(warned)


@lru_cache
def warnings_of(actor: str) -> Warnings:
    """Return the `Warnings` handler of this process, which runs the Ray actor `actor`."""
    return Warnings(actor)


def open_socket() -> socket.socket:
    """Return the socket that a child process passes to `send_to`, to send its warnings to this process."""
    return _get_sockets()[1]


def send_to(ear: socket.socket, who: str, rank: int | None = None) -> None:
    """Send this process's warnings to its parent process, under the name `who`; call this after all imports."""

    def send(warned: ActorWarning) -> None:
        with contextlib.suppress(OSError):  # a warning is lost if the socket is full or closed
            ear.send(json.dumps((who, rank, warned.text)).encode(), socket.MSG_DONTWAIT)

    logging.basicConfig(format="%(message)s")  # warnings are still written to this process's output, too
    Warnings(who, send).attach()


def _get_sockets() -> tuple[socket.socket, socket.socket]:
    with _making:
        return _create_sockets()


@lru_cache
def _create_sockets() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in pair:
        atexit.register(end.close)
    return pair


def _receive() -> Iterator[tuple[str, int | None, str]]:
    """Yield sender, rank and text of each new warning of child processes, without invalid messages."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data = _get_sockets()[0].recv(2**16, socket.MSG_DONTWAIT)
            with contextlib.suppress(ValueError, TypeError):
                who, rank, text = json.loads(data)
                yield str(who), rank if isinstance(rank, int) else None, str(text)[:LENGTH]


def _format_record(record: logging.LogRecord) -> str:
    """Return the first non-empty line of a log record, with the record's exception if there is one."""
    said = next((line.strip() for line in record.getMessage().splitlines() if line.strip()), record.name)
    error = record.exc_info[1] if record.exc_info else None
    return f"{said}: {error!r}"[:LENGTH] if error else said[:LENGTH]
