"""An environment whose import starts a thread."""

import threading

import odd_worlds

STOP = threading.Event()
threading.Thread(target=STOP.wait, daemon=True).start()


class Counter(odd_worlds.Counter):
    """Counts as `odd_worlds.Counter` does."""
