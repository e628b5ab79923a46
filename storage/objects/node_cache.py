"""Caches folders of fetched files on a machine, for all processes of the machine.

    present? --no--> lock the store's cache --> present now? --no--> make room --> `fill` a temporary folder --> rename

- If several processes of a machine request a folder, one process fills the folder and the others wait.
- A folder gets its name only when it is complete. Incomplete folders of killed processes are removed when the next
  folder is filled.
- A folder is kept while a living process uses it. The number of unused folders of all stores is limited, and the least
  recently used folders are removed first. If the disk is too full for a new folder, every unused folder is removed.
- No file is synced to the disk, so a power cut may truncate files. A folder that was filled before the machine's last
  boot is not used.

The locks are file locks of the kernel (`flock`), which releases the locks of a dead process. The cache folder must be
on a local disk, or on a file system that supports such locks.
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

KEPT = 3  # largest number of cached folders per store, unless processes are using more folders
FILLING = ".filling-"  # prefix of the names of incomplete folders
LOCK = ".lock"
WAIT_SECONDS = 900.0  # longest wait, in seconds, for another process of this machine that fills a cache folder
POLL_SECONDS = 0.02
BOOT = Path("/proc/sys/kernel/random/boot_id")


class HeldFolder:
    """A cached folder that is protected from removal for as long as this object exists."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.release = weakref.finalize(self, os.close, descriptor)

    def for_good(self) -> Path:
        """Protect the cached folder from removal until this process ends; return the folder."""
        self.release.detach()
        return self.folder


class NodeCache:
    """The cached folders of one object store on this machine."""

    def __init__(self, cache: Path, store: str, patience: float | None = None) -> None:
        """Open the cache of the object store `store` in the machine's cache folder `cache`, which all object stores
        share.

        The argument `patience` is the additional time, in seconds, that a process may wait for the object store while
        it fills a folder.
        """
        self._cache, self._store = cache, store
        self._wait = WAIT_SECONDS + (patience or 0.0)

    @cached_property
    def _mine(self) -> Path:
        boot = BOOT.read_text() if BOOT.exists() else ""
        return self._cache / hashlib.sha256(f"{self._store} {boot}".encode()).hexdigest()[:16]

    def hold(self, name: str, fill: Callable[[Path], None], whole: Callable[[Path], bool]) -> HeldFolder:
        """Return the cached folder `name`; if the folder does not exist or `whole` returns false, call `fill` first to
        fill the folder.

        Raises:
            Unreachable: another process of this machine takes too long to fill the folder, or the cache cannot be used.
            StoreFailed: the disk of this machine is full.
            Any error that `fill` raises: the folder does not exist afterwards.
        """
        try:
            return self._hold(self._mine / name, fill, whole)
        except OSError as error:  # the cached folder may be intact, for example if this process has too many open files
            raise Unreachable(
                f"the folder {self._cache}, in which this node caches weights, cannot be used now "
                f"({error.strerror or error})"
            ) from error

    def find(self, name: str, whole: Callable[[Path], bool]) -> HeldFolder | None:
        """Return the cached folder `name` if the folder exists and `whole` returns true, else None."""
        try:
            return _present(self._mine / name, whole)
        except OSError:
            return None

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
                    raise Unreachable(
                        f"another process on this node did not finish the download of {name} within {self._wait:g} s"
                    )
                time.sleep(POLL_SECONDS)
            yield

    def _make_room(self, folder: Path, most: int) -> bool:
        """Remove files of killed processes, and remove the least recently used folders that no process uses, until at
        most `most` folders remain.

        Return whether the method has removed a complete folder.
        """
        for store in self._cache.iterdir():
            _sweep(store, locked=store == self._mine)
        with contextlib.suppress(FileNotFoundError):
            _rename_away(folder)  # an incomplete folder is removed even if a process uses it
        present = sorted(self._cache.glob("*/[!.]*"), key=_last_use)
        removable = filter(_remove, present)
        return len([*islice(removable, max(len(present) - most, 0))]) > 0


def _sweep(store: Path, *, locked: bool) -> None:
    """Remove the incomplete cache folders of killed processes. A process that fills a cache folder holds the lock of
    the store's cache, so any other incomplete folder is abandoned.
    """
    with contextlib.suppress(FileNotFoundError), (store / LOCK).open("rb") as lock:
        if locked or _lock(lock.fileno(), fcntl.LOCK_EX):
            for left in store.glob(f"{FILLING}*"):
                shutil.rmtree(left, ignore_errors=True)


def _present(folder: Path, whole: Callable[[Path], bool]) -> HeldFolder | None:
    """Lock and return a cached folder if the folder exists and is complete; else return None."""
    try:
        descriptor = _lock_shared(folder)
    except FileNotFoundError:
        return None
    held = HeldFolder(folder, descriptor)
    if _same(folder, descriptor) and whole(folder):  # another process may have removed the folder before it was locked
        os.utime(folder)
        return held
    held.release()
    return None


def _lock_shared(folder: Path) -> int:
    """Open a folder with a shared lock; if another process is removing the folder, wait the short time that this
    takes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove(folder: Path) -> bool:
    """Remove a cached folder unless a process uses the folder; return whether the folder is gone."""
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
    """Rename a folder, so that its name is free in one step, then remove the folder's files."""
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
