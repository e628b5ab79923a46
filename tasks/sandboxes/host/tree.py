"""Finds, measures and kills the processes and files of one sandbox on the host."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from rollflow.tasks.sandboxes.box.tree import list_children, list_descendants
from rollflow.tasks.sandboxes.box.watch import WALL


def kill_children(list_roots: Callable[[], list[int]]) -> None:
    """Kill and collect these children of this process with everything below them, until none is left.

    The orphans of a killed process become children of this process, so `list_roots` is asked again.
    """
    while roots := list_roots():
        for pid in list_descendants(roots):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in roots:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, WALL)


def collect_orphans(program: int) -> None:
    """Collect the children of this process that have ended, except the program itself."""
    for pid in list_children(os.getpid()):
        if pid != program:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG | WALL)


def measure_folder(folder: str) -> tuple[int, int]:
    """Return the bytes and the number of the files below a folder that can be listed."""
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
