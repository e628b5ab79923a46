"""Whether this process was told to end, as a handler of signals may say it."""

from __future__ import annotations

import time

STEP_SECONDS = 0.1


class Told:
    """As `threading.Event`, without its lock.

    A handler runs in the thread that waits, between any two of its steps. An event's lock may be held there, by the
    wait or by the handler of a signal before: `set` would wait for itself.
    """

    def __init__(self) -> None:
        self._told = False

    def set(self) -> None:
        """From now on it is so."""
        self._told = True

    def wait(self, seconds: float) -> bool:
        """Wait until it is so, for so long at most; whether it is."""
        limit = time.monotonic() + seconds
        while not self._told and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, STEP_SECONDS))
        return self._told
