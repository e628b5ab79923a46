"""Runs a command of Prefect, such as `server start`, with garbage collection in a thread beside the event loop.

Prefect's own server can block for a minute when several flows start at once:

- A connection to SQLite waits for the database's lock, in a thread of its own, for up to 60 seconds.
- Python frees reference cycles in the thread that happens to allocate. If the event loop's thread frees a cycle that
  contains a cursor of the waiting connection, the loop waits until that connection is free.
- The transaction that holds the lock waits for the loop.

A separate thread therefore does all garbage collections of the server. If the collecting thread has to wait, the event
loop continues, and the lock is released. A server on PostgreSQL does not need such a thread.
"""

from __future__ import annotations

import gc
import itertools
import runpy
import threading
import time

YOUNG_SECONDS = 0.5  # interval in seconds between collections of young objects
ALL_EVERY = 60  # number of collections of which one is full; a full collection stops all other threads


def start_collector_thread() -> None:
    """Collect garbage in a separate thread from now on, and in no other."""
    gc.disable()
    threading.Thread(target=_collect_forever, name="garbage", daemon=True).start()


def _collect_forever() -> None:
    for count in itertools.count(1):
        time.sleep(YOUNG_SECONDS)
        gc.collect(1 if count % ALL_EVERY else 2)
        if count == ALL_EVERY:
            gc.freeze()  # the collector does not scan objects from the server's start again


if __name__ == "__main__":
    start_collector_thread()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
