"""Lists the descendants of a process."""

from __future__ import annotations

import contextlib
import os


def list_children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def list_descendants(pids: list[int]) -> list[int]:
    """Return the given process ids and the ids of all their descendants."""
    found = list(pids)
    for pid in found:
        found += list_children(pid)  # the loop also visits the ids that are appended here
    return found
