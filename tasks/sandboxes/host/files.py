"""Reads and writes files in a sandbox's folder without following links, because a program may have created links that
lead out of the folder.
"""

from __future__ import annotations

import errno
import os

from rollflow.tasks.sandboxes.box.wire import read_regular_file

DEEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY


def open_below(folder: str, path: str, flags: int, *, create: bool = False) -> int:
    """Open a file below a folder; reject a path that contains a link or leads out of the folder.

    Raises:
        OSError: the file cannot be opened, or `path` leads out of the folder.
    """
    *parents, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
    if path.startswith("/") or ".." in (*parents, name):
        raise OSError(errno.EACCES, "the path leads out of the sandbox's folder")
    current = os.open(folder, DEEP)
    for parent in parents:
        outer = current
        try:
            if create:
                make_folder(outer, parent)
            current = os.open(parent, DEEP, dir_fd=outer)
        finally:
            os.close(outer)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o755, dir_fd=current)
    finally:
        os.close(current)


def make_folder(outer: int, name: str) -> None:
    """Create a folder if it is missing."""
    try:
        os.mkdir(name, 0o755, dir_fd=outer)
    except FileExistsError:
        return


def write_file(folder: str, path: str, data: bytes) -> None:
    """Write a file below a folder, and create its missing parent folders."""
    fd = open_below(folder, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, create=True)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def read_file(folder: str, path: str, most: int) -> bytes:
    """Read a regular file of at most `most` bytes below a folder."""
    return read_regular_file(open_below(folder, path, os.O_RDONLY), most)
