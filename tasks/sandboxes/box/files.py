"""Reads and writes files in a sandbox's folder, in the process that supervises the sandbox."""

from __future__ import annotations

import os
import struct

from rollflow.tasks.sandboxes.box.rights import check, libc
from rollflow.tasks.sandboxes.box.wire import read_regular_file

FOLDER = "/work"
OPENAT2 = 437
# flags of openat2: stay in this file system, follow no links of /proc, never leave the folder
BENEATH = 0x01 | 0x02 | 0x08


def open_beneath(path: str, flags: int, mode: int = 0) -> int:
    """Open a path below the sandbox's folder; reject links that lead out of the folder."""
    if "\0" in path:
        raise ValueError("the path of a file contains a NUL character")
    folder = os.open(FOLDER, os.O_PATH)
    try:
        how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, BENEATH)
        fd = libc.syscall(OPENAT2, folder, os.fsencode(path or "."), how, len(how))
        check(fd, "open")
        return int(fd)
    finally:
        os.close(folder)


def make_folders(path: str) -> None:
    """Create the missing parent folders of a path below the sandbox's folder."""
    parts = path.split("/")[:-1]
    for count, name in enumerate(parts):
        above = open_beneath("/".join(parts[:count]), os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(name or ".", dir_fd=above)
        except FileExistsError:
            pass  # if the path exists but is a file, the next call of `open_beneath` fails
        finally:
            os.close(above)


def write_file(path: str, data: bytes) -> None:
    """Write a file below the sandbox's folder, and create its missing parent folders."""
    make_folders(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = open_beneath(path, flags, 0o755)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all data to an open file."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_file(path: str, most: int) -> bytes:
    """Read a regular file of at most `most` bytes, without blocking on a pipe or a device."""
    return read_regular_file(open_beneath(path, os.O_RDONLY | os.O_NONBLOCK), most)
