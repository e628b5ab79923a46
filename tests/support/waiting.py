"""Waits in tests. A time limit only ends a hang, and never measures speed, because machines may be slow and busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

HANG_SECONDS = 180.0  # the longest wait for one event: an answer, a start, a death
RUN_SECONDS = 1200.0  # the longest wait for the end of a whole run


def until(true: Callable[[], Found], seconds: float = HANG_SECONDS) -> Found:
    """Wait until `true()` returns a true value, and return that value."""
    limit = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < limit, f"waited {seconds:g} s in vain"
        time.sleep(0.02)
    return found


async def soon(true: Callable[[], Found]) -> Found:
    """Wait as `until` does, in an event loop."""
    async with asyncio.timeout(HANG_SECONDS):
        while not (found := true()):
            await asyncio.sleep(0.002)
        return found
