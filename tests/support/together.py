"""Runs calls at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def together(*calls: Callable[[], object]) -> None:
    """Run the calls at the same moment, each in a thread."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], object]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(one, calls))
