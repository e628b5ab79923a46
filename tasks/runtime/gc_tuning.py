"""Settings of Python's garbage collector for the actors that handle every response.

The collector runs after a number of allocations, and each coroutine is an allocation. With Python's default settings
the collector takes a third of the scheduler's time. The collector spends almost all of this time on imported modules
and on requests in flight, where it finds no garbage.
"""

from __future__ import annotations

import gc

YOUNG = 50_000  # net allocations between two collections of the youngest generation; Python's default is 700
OLDER = 20  # collections of a generation for one of the next older generation


def spare_collector() -> None:
    """Collect less often, and never inspect the present objects; call this function once everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
