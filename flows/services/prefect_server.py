"""Runs a command of Prefect, such as `server start`, with Python's garbage collection in a separate thread.

Without this thread, a Prefect server on SQLite can block for a minute when several flows start at once. If the event
loop's thread frees a cursor of a SQLite connection that waits for the database's lock, the event loop blocks; but the
transaction that holds the lock needs the event loop to finish. A separate collector thread can block without stopping
the event loop.
"""

from __future__ import annotations

import gc
import itertools
import runpy
import threading
import time

YOUNG_SECONDS = 0.5  # seconds between two garbage collections of young objects
ALL_EVERY = 60  # every 60th garbage collection is a full one, which stops all other threads for longer


def start_collector_thread() -> None:
    """Run Python's garbage collector only in a separate thread from now on."""
    gc.disable()
    threading.Thread(target=_collect_forever, name="garbage", daemon=True).start()


def _collect_forever() -> None:
    for count in itertools.count(1):
        time.sleep(YOUNG_SECONDS)
        gc.collect(1 if count % ALL_EVERY else 2)
        if count == ALL_EVERY:
            gc.freeze()  # exclude objects created at the server's start from garbage collection


if __name__ == "__main__":
    start_collector_thread()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
