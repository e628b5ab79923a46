"""Measures the share of time in which a stage of the run was busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyMeter:
    """Adds up the time in which a stage was busy, since the first call of `begin` or `busy`.

    `idle_share` may be called in another thread.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._busy = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """Begin to measure, unless the measurement has already begun."""
        if self._began is None:
            self._began = time.monotonic()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time of a `with` block as busy."""
        self.begin()
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._busy += time.monotonic() - self._since
            self._since = None

    def idle_share(self) -> float:
        """Return the share of the time since `begin` that was not busy; 0 before `begin`."""
        if self._began is None:
            return 0.0
        now, since = time.monotonic(), self._since
        busy = self._busy + (now - since if since is not None else 0.0)
        return max(0.0, 1.0 - busy / max(now - self._began, 1e-9))
