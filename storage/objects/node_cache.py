"""Caches folders of fetched files on a machine, for all processes of the machine.

    present? --no--> lock the store's cache --> present now? --no--> make room --> `fill` a temporary folder --> rename

- If several processes of a node request a folder, one process fills the folder and the others wait.
- A folder gets its name only when it is complete. Incomplete folders of killed processes are removed when the next
  folder is filled.
- A folder stays while a living process uses it. The number of unused folders of all stores is limited, and the least
  recently used folders are removed first. If the disk is too full for a new folder, every unused folder is removed.
- No file is synced, so a power cut may truncate files. A folder from before the node's last boot is not used.

Locks are the kernel's (`flock`), which releases the locks of a dead process. The cache folder must be on a local disk,
or on a file system with such locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

from rollflow.storage.errors import StoreFailed, Unreachable
from rollflow.storage.objects.disk import raise_store_failed

KEPT = 3  # largest number of cached folders, unless processes are using more folders
FILLING = ".filling-"  # prefix of the names of incomplete folders
LOCK = ".lock"
WAIT_SECONDS = 900.0  # longest wait, in seconds, for another process of this node that fills a folder
POLL_SECONDS = 0.02
BOOT = Path("/proc/sys/kernel/random/boot_id")


class HeldFolder:
    """Protects a cached folder from removal for as long as this object exists."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.release = weakref.finalize(self, os.close, descriptor)

    def for_good(self) -> Path:
        """Protect the folder until this process ends; return the folder."""
        self.release.detach()
        return self.folder


class NodeCache:
    """The cached folders of one store on this node."""

    def __init__(self, cache: Path, store: str, patience: float | None = None) -> None:
        """Open the cache of the store `store` in the node's folder `cache`, which all stores share.

        `patience` is the additional time, in seconds, that a process may wait for the store while it fills a folder.
        """
        self._cache, self._store = cache, store
        self._wait = WAIT_SECONDS + (patience or 0.0)

    @cached_property
    def _mine(self) -> Path:
        boot = BOOT.read_text() if BOOT.exists() else ""
        return self._cache / hashlib.sha256(f"{self._store} {boot}".encode()).hexdigest()[:16]

    def hold(self, name: str, fill: Callable[[Path], None], whole: Callable[[Path], bool]) -> HeldFolder:
        """Return the cached folder `name`; first fill it by calling `fill` if it does not exist, or if `whole` returns
        false.

        Raises:
            Unreachable: another process of this node takes too long to fill the folder, or the cache cannot be used.
            StoreFailed: this node's disk is full.
            Any error of `fill`; then the folder does not exist.
        """
        try:
            return self._hold(self._mine / name, fill, whole)
        except OSError as error:  # for example, this process has too many open files, while the folder is intact
            raise Unreachable(
                f"the cache folder {self._cache} cannot be used now ({error.strerror or error})"
            ) from error

    def _hold(self, folder: Path, fill: Callable[[Path], None], whole: Callable[[Path], bool]) -> HeldFolder:
        if held := _present(folder, whole):
            return held
        with raise_store_failed(folder):
            self._mine.mkdir(parents=True, exist_ok=True)
        with self._lock_folder(folder.name):
            if held := _present(folder, whole):
                return held
            self._make_room(folder, KEPT - 1)
            try:
                return self._fill_folder(folder, fill)
            except StoreFailed:
                if not self._make_room(folder, 0):
                    raise
                return self._fill_folder(folder, fill)

    def _fill_folder(self, folder: Path, fill: Callable[[Path], None]) -> HeldFolder:
        with raise_store_failed(folder):
            temporary = Path(tempfile.mkdtemp(prefix=FILLING, dir=self._mine))
        try:
            held = HeldFolder(folder, _lock_shared(temporary))
            fill(temporary)
            temporary.rename(folder)
            return held
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _lock_folder(self, name: str) -> Iterator[None]:
        limit = time.monotonic() + self._wait
        with (self._mine / LOCK).open("ab") as lock:
            while not _lock(lock.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > limit:
                    raise Unreachable(f"waited {self._wait:g} s for another process on this node to fetch {name}")
                time.sleep(POLL_SECONDS)
            yield

    def _make_room(self, folder: Path, most: int) -> bool:
        """Remove files of killed processes, and the least recently used of the unused folders, until at most `most`
        remain.

        Return whether a complete folder was removed.
        """
        for store in self._cache.iterdir():
            _sweep(store, locked=store == self._mine)
        with contextlib.suppress(FileNotFoundError):
            _rename_away(folder)  # the folder is incomplete, so it is removed even if a process uses it
        present = sorted(self._cache.glob("*/[!.]*"), key=_last_use)
        removable = filter(_remove, present)
        return len([*islice(removable, max(len(present) - most, 0))]) > 0


def _sweep(store: Path, *, locked: bool) -> None:
    """Remove incomplete folders of killed processes. A living process holds the lock of its store's cache while it
    fills a folder.
    """
    with contextlib.suppress(FileNotFoundError), (store / LOCK).open("rb") as lock:
        if locked or _lock(lock.fileno(), fcntl.LOCK_EX):
            for left in store.glob(f"{FILLING}*"):
                shutil.rmtree(left, ignore_errors=True)


def _present(folder: Path, whole: Callable[[Path], bool]) -> HeldFolder | None:
    """Lock and return the folder if it exists and is complete; else return None."""
    try:
        descriptor = _lock_shared(folder)
    except FileNotFoundError:
        return None
    held = HeldFolder(folder, descriptor)
    if _same(folder, descriptor) and whole(folder):  # the folder may have been removed before it was locked
        os.utime(folder)
        return held
    held.release()
    return None


def _lock_shared(folder: Path) -> int:
    """Open `folder` with a shared lock; wait for a process that is removing the folder, which takes only moments."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove(folder: Path) -> bool:
    """Remove a folder unless a process uses it; return whether it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # another process has removed the folder
    try:
        removable = _lock(descriptor, fcntl.LOCK_EX) and _same(folder, descriptor)
        if removable:
            _rename_away(folder)
        return removable
    finally:
        os.close(descriptor)


def _rename_away(folder: Path) -> None:
    """Free the folder's name in one step, then remove its files."""
    gone = folder.with_name(f"{FILLING}{folder.name}-{os.getpid()}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _lock(descriptor: int, kind: int) -> bool:
    """Try to lock a file without waiting; return whether the lock was acquired."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _last_use(folder: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0
