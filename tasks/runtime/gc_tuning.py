"""Settings of Python's garbage collector for the actors that handle every response.

The collector runs after a number of allocations, and each coroutine is one. With Python's default settings it takes a
third of the scheduler's time. Almost all of that is spent on imported modules and on what is in flight, where it finds
nothing.
"""

from __future__ import annotations

import gc

YOUNG = 50_000  # net allocations between two collections of the youngest generation; Python's default is 700
OLDER = 20  # collections of a generation for one of the next older generation


def spare_collector() -> None:
    """Collect less often, and never inspect the objects that exist now; call this once everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
