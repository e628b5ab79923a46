"""Runs a command of Prefect, such as `server start`, with garbage collection in a separate thread.

Without this thread, a Prefect server on SQLite can block for a minute when several flows start at once.

* A connection to SQLite waits for the database's lock for up to 60 seconds, in its own thread.
* Python collects garbage in the thread that happens to allocate memory. If the event loop's thread collects a cursor of
  the waiting connection, the event loop waits for this connection.
* The transaction that holds the database's lock waits for the event loop.

A separate thread that collects garbage may wait for a connection while the event loop continues and the lock is
released. A Prefect server on PostgreSQL does not need the thread.
"""

from __future__ import annotations

import gc
import itertools
import runpy
import threading
import time

YOUNG_SECONDS = 0.5  # seconds between garbage collections of young objects
ALL_EVERY = 60  # every 60th garbage collection is a full one, which stops all other threads for longer


def start_collector_thread() -> None:
    """Collect garbage only in a separate thread from now on."""
    gc.disable()
    threading.Thread(target=_collect_forever, name="garbage", daemon=True).start()


def _collect_forever() -> None:
    for count in itertools.count(1):
        time.sleep(YOUNG_SECONDS)
        gc.collect(1 if count % ALL_EVERY else 2)
        if count == ALL_EVERY:
            gc.freeze()  # exclude the objects of the server's start from later collections


if __name__ == "__main__":
    start_collector_thread()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
