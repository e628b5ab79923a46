"""Kills and reaps the processes of a sandbox on the host, and measures the sandbox's folder."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from rollflow.tasks.sandboxes.box.programs import WALL
from rollflow.tasks.sandboxes.box.tree import list_children, list_descendants


def kill_children(list_roots: Callable[[], list[int]]) -> None:
    """Kill and reap the child processes that `list_roots` returns, with all descendants, until `list_roots` returns
    none.

    `list_roots` is called repeatedly, because orphans of a killed process become children of this process.
    """
    while roots := list_roots():
        for pid in list_descendants(roots):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in roots:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, WALL)


def collect_orphans(program: int) -> None:
    """Reap all ended child processes except the process `program`."""
    for pid in list_children(os.getpid()):
        if pid != program:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG | WALL)


def measure_folder(folder: str) -> tuple[int, int]:
    """Return the total size in bytes and the number of all files below a folder; skip folders that cannot be listed."""
    size = count = 0
    folders = [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
    return size, count
