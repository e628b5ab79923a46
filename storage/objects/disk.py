"""Memory-maps, hashes and writes local files, and turns errors of the operating system into rollflow's errors."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import cast

from rollflow.storage.errors import Missing, StoreFailed, Unreachable
from rollflow.storage.objects.base import CHUNK, hash_pieces
from rollflow.storage.objects.translation import ErrorTranslator

CURES = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space within this user's quota",
    errno.EFBIG: "raise the largest file size that this process may write (ulimit -f)",
    errno.EROFS: "mount the file system so that it can be written",
    errno.EACCES: "give this user the right to write the file",
    errno.EPERM: "give this user the right to write the file",
    errno.EIO: "check the disk",
}

NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

AHEAD = 4 << 20  # largest size of one write in bytes; after each write the kernel is asked to start writing to the disk
MOST_PARTS = 512  # largest number of buffers in one `writev` call; Linux and macOS accept 1024
SYNC_FILE_RANGE_WRITE = 2


def _early() -> Callable[[int, int, int, int], int] | None:
    """Load Linux's function `sync_file_range`, which starts writing to the disk before `fsync`; return None on other
    systems."""
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast(Callable[[int, int, int, int], int], found)


_sync_file_range = _early()


def raise_store_failed(target: Path) -> ErrorTranslator:
    """Turn the operating system's errors that `CURES` lists (a full disk, for example) into `StoreFailed`."""

    def translate(error: BaseException) -> Exception | None:
        if not isinstance(error, OSError) or (cure := CURES.get(error.errno or 0)) is None:
            return None
        return StoreFailed(
            f"{target} cannot be written ({error.strerror}), and nothing was committed; {cure}, then resume the run"
        )

    return ErrorTranslator(translate)


def raise_missing(target: Path) -> ErrorTranslator:
    """Turn the operating system's error for a missing file into `Missing`, and other read errors into `Unreachable`."""

    def translate(error: BaseException) -> Exception | None:
        if isinstance(error, NO_FILE):
            return Missing(f"the object {target} does not exist")
        if isinstance(error, OSError):
            return Unreachable(f"{target} cannot be read now ({error.strerror or error}); the object may be intact")
        return None

    return ErrorTranslator(translate)


def map_file(path: Path) -> memoryview:
    """Memory-map a file; pages are loaded when they are read, and writes to the memory do not change the file.

    Raises `Missing` if the file does not exist, or `Unreachable` if the file cannot be read.
    """
    with raise_missing(path), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, which is read in chunks. Raises `Missing` if the file does not exist, or
    `Unreachable` if the file cannot be read."""
    with raise_missing(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_out(file: int, parts: Sequence[memoryview]) -> None:
    """Write buffers to an open new file, in the given order. The operating system starts writing to the disk at once,
    so a later `fsync` takes less time."""
    start = 0
    for group in _groups(parts):
        size = sum(map(len, group))
        _write_all(file, group)
        if _sync_file_range is not None:
            # the call's result is not checked, because a later `fsync` reports any failure
            _sync_file_range(file, start, size, SYNC_FILE_RANGE_WRITE)
        start += size


def _groups(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split a list of buffers into groups of at most `MOST_PARTS` buffers and about `AHEAD` bytes; larger buffers are
    cut."""
    group, room = list[memoryview](), AHEAD
    for part in parts:
        for start in range(0, len(part), AHEAD):
            piece = part[start : start + AHEAD]
            if group and (len(piece) > room or len(group) == MOST_PARTS):
                yield group
                group, room = [], AHEAD
            group.append(piece)
            room -= len(piece)
    yield group


def _write_all(file: int, parts: list[memoryview]) -> None:
    """Write all buffers, with as many `writev` calls as are needed, because one call may write only some of the
    bytes."""
    while parts:
        written = os.writev(file, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]


@contextmanager
def hash_in_thread(parts: Sequence[memoryview]) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the sha256 of the buffers; long data is hashed in a thread while the `with` block
    runs.
    """
    if sum(map(len, parts)) < CHUNK:
        yield cache(partial(hash_pieces, parts))
        return
    with ThreadPoolExecutor(1, "sha256") as pool:
        yield pool.submit(hash_pieces, parts).result
