"""Provides a flag by which a signal handler tells the main thread to end the process."""

from __future__ import annotations

import time

STEP_SECONDS = 0.1


class StopFlag:
    """A flag like `threading.Event` that a signal handler can set, because it has no lock.

    The lock of a `threading.Event` may be held when a signal handler interrupts the thread, so `Event.set` in a handler
    could wait forever.
    """

    def __init__(self) -> None:
        self._told = False

    def set(self) -> None:
        """Set the flag."""
        self._told = True

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most `seconds`; return whether the flag is set."""
        limit = time.monotonic() + seconds
        while not self._told and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, STEP_SECONDS))
        return self._told
