"""A flag with which a signal handler tells this process to end."""

from __future__ import annotations

import time

STEP_SECONDS = 0.1


class StopFlag:
    """A flag like `threading.Event`, but without its lock.

    A signal handler runs in the waiting thread, between any two of its steps. An event's lock may be held there, by the
    wait or by an earlier signal handler: `set` would wait for itself.
    """

    def __init__(self) -> None:
        self._told = False

    def set(self) -> None:
        """Set the flag."""
        self._told = True

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most `seconds`; return whether it is set."""
        limit = time.monotonic() + seconds
        while not self._told and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, STEP_SECONDS))
        return self._told
