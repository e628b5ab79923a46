"""A flag with which a signal handler tells this process to end."""

from __future__ import annotations

import time

STEP_SECONDS = 0.1


class StopFlag:
    """A flag like `threading.Event`, but without its lock.

    A signal handler runs in the waiting thread, between any two steps of the thread. At that moment the wait or an
    earlier signal handler may hold an event's lock, so `Event.set` would wait for its own thread.
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
