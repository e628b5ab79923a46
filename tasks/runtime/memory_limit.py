"""Limits the memory of a process, so that one process cannot use up the memory of the machine."""

from __future__ import annotations

import resource
from pathlib import Path

PAGE = resource.getpagesize()


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its present size plus `more` bytes.

    Python raises `MemoryError` if the process needs more memory.
    """
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = size + more if hard == resource.RLIM_INFINITY else min(size + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
