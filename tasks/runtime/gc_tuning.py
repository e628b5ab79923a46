"""Python's garbage collector in the actors that handle every response.

It is called once for so many objects made, and a coroutine is one: with Python's own settings it takes a third of the
scheduler's time, almost all of it to look at what was imported and at what is in flight, and finds nothing.
"""

from __future__ import annotations

import gc

YOUNG = 50_000  # objects, beyond those that were freed, between two looks at the young ones; Python's own is 700
OLDER = 20  # looks at the young ones for one at those that outlived it


def spare_collector() -> None:
    """Look less often, and never at what there is now: call it once everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
