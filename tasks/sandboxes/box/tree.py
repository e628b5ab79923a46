"""Lists the descendants of a process."""

from __future__ import annotations

import contextlib
import os


def list_children(pid: int) -> list[int]:
    """Return the ids of the children of a process, those of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def list_descendants(pids: list[int]) -> list[int]:
    """Return these processes and everything that descends from them."""
    found = list(pids)
    for pid in found:
        found += list_children(pid)  # the loop also goes through what is added here
    return found
