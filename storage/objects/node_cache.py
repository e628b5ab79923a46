"""Folders in which a node keeps what it fetched or checked: made once for all its processes, whole or not there.

    held already? --no--> the store's lock --> made meanwhile? --no--> room --> `fill` beside it --> its name --> hold

- However many processes of a node ask for a folder at a time, one fills it and the others wait.
- A folder has its name only when it is whole. What a killed process left is removed by the next one that fills.
- What a living process holds stays. Of the rest, over all stores, the longest unused go first. If the disk has no room
  for one more folder, all of the rest go.
- Nothing is synced. So what is older than the node's last start is not used: a power cut may have cut it short.

Locks are the kernel's (`flock`): when a process dies, whatever the reason, its locks are free. The folder must be on a
disk of the node, or on a file system with such locks.
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
from rollflow.storage.objects.disk import explained

KEPT = 3  # the most folders, unless more are held
FILLING = ".filling-"  # what a folder is called until it is whole
LOCK = ".lock"
WAIT_SECONDS = 900.0  # for another process of this node that fills, while the store answers
POLL_SECONDS = 0.02
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Held:
    """A folder that stays while this object lives."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.release = weakref.finalize(self, os.close, descriptor)

    def for_good(self) -> Path:
        """The folder, which stays from now on while this process lives."""
        self.release.detach()
        return self.folder


class NodeCache:
    """The folders of one store in the cache of a node. See the module's docstring."""

    def __init__(self, cache: Path, store: str, patience: float | None = None) -> None:
        """`cache` is the node's, for all stores; `store` says whose folders these are.

        `patience`: seconds that whoever fills a folder may wait for the store, in addition.
        """
        self._cache, self._store = cache, store
        self._wait = WAIT_SECONDS + (patience or 0.0)

    @cached_property
    def _mine(self) -> Path:
        boot = BOOT.read_text() if BOOT.exists() else ""
        return self._cache / hashlib.sha256(f"{self._store} {boot}".encode()).hexdigest()[:16]

    def hold(self, name: str, fill: Callable[[Path], None], whole: Callable[[Path], bool]) -> Held:
        """The folder `name`: as it is if it is `whole`, or filled anew.

        Raises:
            Unreachable: another process of this node was at it for too long, or the cache cannot be used now.
            StoreFailed: there is no room on this node's disk.
            Whatever `fill` raises; then there is no such folder.
        """
        try:
            return self._hold(self._mine / name, fill, whole)
        except OSError as error:  # too many open files, for example: the folder may still be good
            raise Unreachable(f"{self._cache} cannot be used now ({error.strerror or error})") from error

    def _hold(self, folder: Path, fill: Callable[[Path], None], whole: Callable[[Path], bool]) -> Held:
        if held := _present(folder, whole):
            return held
        with explained(folder):
            self._mine.mkdir(parents=True, exist_ok=True)
        with self._locked(folder.name):
            if held := _present(folder, whole):
                return held
            self._make_room(folder, KEPT - 1)
            try:
                return self._filled(folder, fill)
            except StoreFailed:
                if not self._make_room(folder, 0):
                    raise
                return self._filled(folder, fill)

    def _filled(self, folder: Path, fill: Callable[[Path], None]) -> Held:
        with explained(folder):
            temporary = Path(tempfile.mkdtemp(prefix=FILLING, dir=self._mine))
        try:
            held = Held(folder, _shared(temporary))
            fill(temporary)
            temporary.rename(folder)
            return held
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        limit = time.monotonic() + self._wait
        with (self._mine / LOCK).open("ab") as lock:
            while not _lock(lock.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > limit:
                    raise Unreachable(f"waited {self._wait:g} s for another process of this node to fetch {name}")
                time.sleep(POLL_SECONDS)
            yield

    def _make_room(self, folder: Path, most: int) -> bool:
        """Make room for one more folder: what nobody holds goes, the longest unused first; and what killed processes
        left.

        Returns whether a whole folder went.
        """
        for store in self._cache.iterdir():
            _sweep(store, locked=store == self._mine)
        with contextlib.suppress(FileNotFoundError):
            _rename_away(folder)  # not whole, whoever holds it
        present = sorted(self._cache.glob("*/[!.]*"), key=_used)
        removable = filter(_remove, present)
        return len([*islice(removable, max(len(present) - most, 0))]) > 0


def _sweep(store: Path, *, locked: bool) -> None:
    """Remove what killed processes left unfinished. (A process that is filling a folder has its store's lock.)"""
    with contextlib.suppress(FileNotFoundError), (store / LOCK).open("rb") as lock:
        if locked or _lock(lock.fileno(), fcntl.LOCK_EX):
            for left in store.glob(f"{FILLING}*"):
                shutil.rmtree(left, ignore_errors=True)


def _present(folder: Path, whole: Callable[[Path], bool]) -> Held | None:
    """The folder, held, if it is there and whole."""
    try:
        descriptor = _shared(folder)
    except FileNotFoundError:
        return None
    held = Held(folder, descriptor)
    if _same(folder, descriptor) and whole(folder):  # else it was removed before it was locked
        os.utime(folder)
        return held
    held.release()
    return None


def _shared(folder: Path) -> int:
    """A descriptor that holds `folder`; whoever removes it has it locked for a moment only."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove(folder: Path) -> bool:
    """Remove a folder unless it is held."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # gone already
    try:
        removable = _lock(descriptor, fcntl.LOCK_EX) and _same(folder, descriptor)
        if removable:
            _rename_away(folder)
        return removable
    finally:
        os.close(descriptor)


def _rename_away(folder: Path) -> None:
    """One step, after which nothing has that name."""
    gone = folder.with_name(f"{FILLING}{folder.name}-{os.getpid()}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _lock(descriptor: int, kind: int) -> bool:
    """Take a lock if nobody is in the way."""
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


def _used(folder: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0
