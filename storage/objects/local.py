"""Stores objects as files in a local folder. Readers see only whole files, and exactly one of several racing creators
succeeds.

An object is written to a locked temporary file in the folder `.tmp`, synced, and then named in one step: `create` makes
a hard link, which fails if the name exists, and `put` renames the file. The folder of the object is synced last, so
that a completed write survives a power cut. A temporary file that no process has locked was left by a killed process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollflow.storage.errors import ConfigError, Conflict, StoreFailed, Unreachable
from rollflow.storage.objects.base import (
    ABANDONED_SECONDS,
    CHUNK,
    Data,
    ObjectStat,
    ObjectStore,
    UnfinishedWrite,
    check_path,
    split_buffers,
)
from rollflow.storage.objects.disk import NO_FILE, hash_in_thread, raise_missing, raise_store_failed, write_out

SCRATCH = ".tmp"
TURN = "turn"  # the lock file of `_rename_once` in the folder `.tmp`, where all other names are hexadecimal
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class LocalStore(ObjectStore):
    """An object store whose objects are files below the folder `root`; the first write creates the folder."""

    root: Path
    scratch: Path | None = field(default=None, compare=False)  # the folder of temporary files, which child stores share
    # folders whose names this process has synced to the disk
    _synced: set[Path] = field(default_factory=set, init=False, compare=False, repr=False)

    @property
    def uri(self) -> str:
        return str(self.root)

    def child(self, prefix: str) -> LocalStore:
        return LocalStore(self.local_path(prefix), self._scratch)

    def local_path(self, path: str) -> Path:
        if SCRATCH in check_path(path).split("/"):
            raise ValueError(f"{path!r} is not a valid path of an object, because the name {SCRATCH} is reserved")
        return self.root / path

    def put(self, path: str, data: Data) -> str:
        target, parts = self.local_path(path), split_buffers(data)
        with (
            raise_store_failed(target),
            hash_in_thread(parts) as sha256,
            self._write_temporary(parts) as (temporary, file),
        ):
            os.fsync(file)
            self._make_room(target)
            self._sync_above(target)
            with _unless_done(file, target):
                os.replace(temporary, target)
            _sync_name(target)
            return sha256()

    def create(self, path: str, data: Data) -> None:
        target = self._free(path)
        with raise_store_failed(target), self._write_temporary(split_buffers(data)) as (temporary, file):
            os.fsync(file)
            self._make_room(target)
            self._sync_above(target)
            self._name_once(temporary, file, target)
            _sync_name(target)

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        """Write a data object and a second object that names the data object, and sync both together. The data object
        gets its name `file` before it is synced, because no reader knows the name yet.
        """
        target, named, parts = self._free(path), self.local_path(file), split_buffers(data)
        with (
            raise_store_failed(target),
            hash_in_thread(parts) as sha256,
            self._write_temporary(parts) as (body, body_file),
        ):
            self._make_room(named)
            self._make_room(target)
            os.replace(body, named)
            with self._write_temporary(split_buffers(content(sha256()))) as (naming, naming_file):
                os.fsync(body_file)
                os.fsync(naming_file)
                self._sync_above(named)
                self._sync_above(target)
                _sync_folder(named.parent)
                self._name_once(naming, naming_file, target)
                _sync_name(target)
            return sha256()

    def get(self, path: str) -> bytes:
        target = self.local_path(path)
        with raise_missing(target):
            return target.read_bytes()

    def fetch(self, path: str, file: Path) -> str:
        read = hashlib.sha256()
        with raise_store_failed(file), open(file, "xb", buffering=0) as copy:
            for chunk in _chunks(self.local_path(path)):
                read.update(chunk)
                copy.write(chunk)
        return read.hexdigest()

    def stat(self, path: str) -> ObjectStat:
        target = self.local_path(path)
        with raise_missing(target):
            known = target.stat()
            if stat.S_ISDIR(known.st_mode):
                raise IsADirectoryError
            return ObjectStat(known.st_size, known.st_mtime)

    def exists(self, path: str) -> bool:
        target = self.local_path(path)
        with raise_missing(target):
            return target.is_file()

    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        top = self.local_path(prefix) if prefix else self.root
        with raise_missing(top):
            names = (path.relative_to(self.root).as_posix() for path in _files(top))
            return iter(sorted(name for name in names if name > after))

    def folders(self, prefix: str) -> Sequence[str]:
        """List the folders below `prefix`. A listed folder may be empty while its first object is being written."""
        top = self.local_path(prefix)
        try:
            return sorted(entry.name for entry in os.scandir(top) if entry.is_dir() and entry.name != SCRATCH)
        except NO_FILE:
            return []

    def delete(self, path: str) -> None:
        target = self.local_path(path)
        with contextlib.suppress(*NO_FILE), raise_store_failed(target):
            target.unlink()

    def list_unfinished(self) -> Iterator[UnfinishedWrite]:
        for path in sorted(self._scratch.glob(f"[!{TURN[0]}]*")):
            # the file is gone, because its write finished while the folder was listed
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                yield UnfinishedWrite(f"{SCRATCH}/{path.name}", found.st_size, found.st_mtime)

    def discard(self, left: UnfinishedWrite) -> None:
        path = self._scratch / left.name.rpartition("/")[2]
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError),
            raise_store_failed(path),
            open(path, "rb") as file,
        ):
            _lock(file.fileno())
            path.unlink()

    def check(self) -> None:
        probe = f"probe-{uuid.uuid4().hex}"
        try:
            self.create(probe, b"rollflow")
            self.get(probe)
            oldest = self.stat(probe).modified - ABANDONED_SECONDS
            self.delete(probe)
            for left in self.list_unfinished():
                if left.touched < oldest:
                    self.discard(left)
        except (OSError, StoreFailed, Unreachable) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            raise ConfigError(
                f"store.uri = {self.uri!r} cannot be written ({getattr(cause, 'strerror', cause)}); "
                "name a folder that this user may write to, on a disk with space left"
            ) from error

    @property
    def _scratch(self) -> Path:
        return self.scratch or self.root / SCRATCH

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the store without the set `_synced`, because each process must sync the names of folders itself."""
        return LocalStore, (self.root, self.scratch)

    def _make_room(self, target: Path) -> None:
        """Create the folders above `target`; the method `_sync_above` syncs these folders later."""
        _make_folder(self.root)
        if not target.parent.is_dir():
            self._synced.difference_update(target.parents)
            target.parent.mkdir(parents=True, exist_ok=True)

    def _sync_above(self, target: Path) -> None:
        """Sync the names of all folders above `target` to the disk. A process syncs the name of each folder only
        once."""
        folder = target.parent
        if folder not in self._synced and folder != folder.parent:
            self._sync_above(folder)
            with contextlib.suppress(PermissionError):  # a folder above the store's root may belong to another user
                _sync_folder(folder.parent)
            self._synced.add(folder)

    def _free(self, path: str) -> Path:
        """Return the path of the local file for object `path`; raise `Conflict` if the file exists."""
        target = self.local_path(path)
        if target.exists():
            raise _name_conflict(target)
        return target

    @contextlib.contextmanager
    def _write_temporary(self, parts: Sequence[memoryview]) -> Iterator[tuple[Path, int]]:
        """Write buffers to a temporary file without syncing, yield the file's path and descriptor, and remove the file
        afterwards.
        """
        _make_folder(self._scratch)
        temporary = self._scratch / uuid.uuid4().hex
        try:
            with open(temporary, "xb", buffering=0) as file:
                _lock(file.fileno())
                write_out(file.fileno(), parts)
                yield temporary, file.fileno()
        finally:
            # the temporary file may have been renamed, and a leftover file is removed later
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _name_once(self, temporary: Path, file: int, target: Path) -> None:
        try:
            with _unless_done(file, target):
                os.link(temporary, target)
        except OSError as error:
            if error.errno in NO_LINKS:
                self._rename_once(temporary, file, target)
            elif isinstance(error, FileExistsError) or target.exists():
                raise _name_conflict(target) from error
            else:
                raise

    def _rename_once(self, temporary: Path, file: int, target: Path) -> None:
        """Rename a temporary file to a new name under a lock, for file systems without hard links. The kernel releases
        the lock of a killed process."""
        with open(self._scratch / TURN, "ab") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if target.exists():
                raise _name_conflict(target)
            with _unless_done(file, target):
                os.rename(temporary, target)


def _chunks(source: Path) -> Iterator[bytes]:
    with raise_missing(source), open(source, "rb", buffering=0) as whole:
        while chunk := whole.read(CHUNK):
            yield chunk


def _lock(file: int) -> None:
    """Lock a temporary file, either as its writer or to check that the writing process has ended.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # any other error means that the file system has no locks, so abandoned files are recognised by age only
        if isinstance(error, BlockingIOError):
            raise


def _files(top: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(top, onerror=_unless_gone, followlinks=True):
        if SCRATCH in folders:
            folders.remove(SCRATCH)
        for name in names:
            yield Path(folder, name)


def _unless_gone(error: OSError) -> None:
    """Ignore the error of a folder that was removed while the store was listed; raise the error of a folder that cannot
    be read."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync the name of each new folder to the disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return  # another writer created it
    _sync_folder(folder.parent)


@contextlib.contextmanager
def _unless_done(file: int, target: Path) -> Iterator[None]:
    """Ignore an error of a link or rename call if the call has succeeded nevertheless, so that `target` names the open
    file `file`.

    A network file system may repeat a request whose answer was lost, and then report that the name exists.
    """
    try:
        yield
    except OSError:
        if not _lies_at(file, target):
            raise


def _lies_at(file: int, target: Path) -> bool:
    """Return whether the path `target` names the open file `file`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(target))
    except NO_FILE:
        return False
    except OSError as error:
        raise Unreachable(
            f"it is unknown whether {target} was written ({error.strerror or error}); read the object again"
        ) from error


def _name_conflict(target: Path) -> Conflict:
    """Sync an existing file name, in case the writing process was killed before it synced the name; return a `Conflict`
    for the name.
    """
    _sync_name(target)
    return Conflict(f"{target} exists already")


def _sync_name(created: Path) -> None:
    """Sync the folder of a new name. If the sync fails, raise `Unreachable`, because other processes may already have
    read the object.
    """
    try:
        _sync_folder(created.parent)
    except OSError as error:
        raise Unreachable(
            f"{created} exists, but may be lost after a power failure ({error.strerror or error}); read the "
            "object again"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
