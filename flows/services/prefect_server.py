"""Prefect's command, `server start` say, in a process that collects its garbage beside its event loop.

In a server of Prefect's own all of it can stand still for a minute, when several flows start at once:

- A connection to SQLite that waits for the database's lock is in use, in a thread of its own, for up to 60 seconds.
- Python frees what is in reference cycles in whatever thread makes objects at the moment. Where that is the event
  loop's, and a cursor of the waiting connection is among it, the loop waits until that connection is free.
- The transaction that has the lock waits for the loop.

So a thread that does nothing else collects: if it has to wait, the loop goes on, and the lock is given back. A server
on PostgreSQL needs none of this.
"""

from __future__ import annotations

import gc
import itertools
import runpy
import threading
import time

YOUNG_SECONDS = 0.5  # between two collections of what is new
ALL_EVERY = 60  # of these is one of all; nobody else runs meanwhile


def collect_beside() -> None:
    """From now on a thread collects, and no other does."""
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    for count in itertools.count(1):
        time.sleep(YOUNG_SECONDS)
        gc.collect(1 if count % ALL_EVERY else 2)
        if count == ALL_EVERY:
            gc.freeze()  # what the server began with stays, and is not gone through again


if __name__ == "__main__":
    collect_beside()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
