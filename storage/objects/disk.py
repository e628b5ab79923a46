"""What all backends need of this machine's disk: its trouble in words, and files as memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rollflow.storage.errors import StoreFailed

CURES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space within this user's quota",
    errno.EFBIG: "raise the largest file size that this process may write",
    errno.EROFS: "mount that disk for writing",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EIO: "check that disk",
}


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """A disk that takes no more is `StoreFailed`; other errors pass."""
    try:
        yield
    except OSError as error:
        cure = CURES.get(error.errno or 0)
        if cure is None:
            raise
        raise StoreFailed(
            f"{target} cannot be written ({error.strerror}); nothing was committed: {cure}, then resume the run"
        ) from error


def mapped(path: Path) -> memoryview:
    """The bytes of a file, uncopied: pages come when they are looked at, and writes to them stay in this process."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


class Later:
    """A value worked out in a thread while the block runs (hashing and writing leave Python's lock to others)."""

    def __init__(self, work: Callable[[], str], *, at_once: bool) -> None:
        """`at_once`: there is too little to do for a thread."""
        self.value = work() if at_once else ""
        self._thread = None if at_once else threading.Thread(target=self._run, args=(work,))

    def _run(self, work: Callable[[], str]) -> None:
        self.value = work()

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()
