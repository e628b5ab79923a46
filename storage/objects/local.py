"""A folder as an object store: whole files only, and of racing creators exactly one wins.

An object is written to a temporary file and synced there, then gets its name in one step: `create` by a
hard link, which fails if the name is taken, `put` by a rename, which replaces. The folder is synced after,
so what was reported as written survives a power cut. Temporary files lie in `.tmp`, which is no part of
the store. A writer holds a lock on its file, so that a file of a killed writer can be told from one being written.

A name is an object or a folder of objects, not both.
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
    ObjectStore,
    Stat,
    Unfinished,
    checked,
    pieces,
)
from rollflow.storage.objects.disk import NO_FILE, explained, found, hashed, write_out

SCRATCH = ".tmp"
TURN = "turn"  # other names in there are hexadecimal
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class LocalStore(ObjectStore):
    """Objects as files below `root`; the folder is made by the first write."""

    root: Path
    scratch: Path | None = field(default=None, compare=False)  # a child shares its parent's
    _synced: set[Path] = field(default_factory=set, init=False, compare=False, repr=False)  # folders, by name

    @property
    def uri(self) -> str:
        return str(self.root)

    def child(self, prefix: str) -> LocalStore:
        return LocalStore(self.local_path(prefix), self._scratch)

    def local_path(self, path: str) -> Path:
        if SCRATCH in checked(path).split("/"):
            raise ValueError(f"not an object path: {path!r} ({SCRATCH} is reserved)")
        return self.root / path

    def put(self, path: str, data: Data) -> str:
        target, parts = self.local_path(path), pieces(data)
        with explained(target), hashed(parts) as sha256, self._written(parts) as (temporary, file):
            os.fsync(file)
            self._make_room(target)
            self._sync_above(target)
            with _unless_done(file, target):
                os.replace(temporary, target)
            _sync_name(target)
            return sha256()

    def create(self, path: str, data: Data) -> None:
        target = self._free(path)
        with explained(target), self._written(pieces(data)) as (temporary, file):
            os.fsync(file)
            self._make_room(target)
            self._sync_above(target)
            self._name_once(temporary, file, target)
            _sync_name(target)

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        """See the contract. `file` gets its name before it is synced; nobody looks for it yet: one sync serves both."""
        target, named, parts = self._free(path), self.local_path(file), pieces(data)
        with explained(target), hashed(parts) as sha256, self._written(parts) as (body, body_file):
            self._make_room(named)
            self._make_room(target)
            os.replace(body, named)
            with self._written(pieces(content(sha256()))) as (naming, naming_file):
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
        with found(target):
            return target.read_bytes()

    def fetch(self, path: str, file: Path) -> str:
        read = hashlib.sha256()
        with explained(file), open(file, "xb", buffering=0) as copy:
            for chunk in _chunks(self.local_path(path)):
                read.update(chunk)
                copy.write(chunk)
        return read.hexdigest()

    def stat(self, path: str) -> Stat:
        target = self.local_path(path)
        with found(target):
            known = target.stat()
            if stat.S_ISDIR(known.st_mode):
                raise IsADirectoryError
            return Stat(known.st_size, known.st_mtime)

    def exists(self, path: str) -> bool:
        target = self.local_path(path)
        with found(target):
            return target.is_file()

    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        top = self.local_path(prefix) if prefix else self.root
        with found(top):
            names = (path.relative_to(self.root).as_posix() for path in _files(top))
            return iter(sorted(name for name in names if name > after))

    def folders(self, prefix: str) -> Sequence[str]:
        """Also a folder that was made for an object that is not there yet."""
        top = self.local_path(prefix)
        try:
            return sorted(one.name for one in os.scandir(top) if one.is_dir() and one.name != SCRATCH)
        except NO_FILE:
            return []

    def delete(self, path: str) -> None:
        target = self.local_path(path)
        with contextlib.suppress(*NO_FILE), explained(target):
            target.unlink()

    def unfinished(self) -> Iterator[Unfinished]:
        for path in sorted(self._scratch.glob(f"[!{TURN[0]}]*")):
            with contextlib.suppress(FileNotFoundError):  # its writer has just finished
                found = path.stat()
                yield Unfinished(f"{SCRATCH}/{path.name}", found.st_size, found.st_mtime)

    def discard(self, left: Unfinished) -> None:
        path = self._scratch / left.name.rpartition("/")[2]
        with contextlib.suppress(FileNotFoundError, BlockingIOError), explained(path), open(path, "rb") as file:
            _lock(file.fileno())
            path.unlink()

    def check(self) -> None:
        probe = f"probe-{uuid.uuid4().hex}"
        try:
            self.create(probe, b"rollflow")
            self.get(probe)
            oldest = self.stat(probe).modified - ABANDONED_SECONDS
            self.delete(probe)
            for left in self.unfinished():
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
        """What is synced, each process finds out."""
        return LocalStore, (self.root, self.scratch)

    def _make_room(self, target: Path) -> None:
        """The folders above `target`, still to be synced."""
        _make_folder(self.root)
        if not target.parent.is_dir():
            self._synced.difference_update(target.parents)
            target.parent.mkdir(parents=True, exist_ok=True)

    def _sync_above(self, target: Path) -> None:
        """Sync the names of the folders above `target`, up to the root: of each once, whoever made it."""
        folder = target.parent
        if folder not in self._synced and folder != folder.parent:
            self._sync_above(folder)
            with contextlib.suppress(PermissionError):  # above the root
                _sync_folder(folder.parent)
            self._synced.add(folder)

    def _free(self, path: str) -> Path:
        """Where `path` lies, if nothing is there."""
        target = self.local_path(path)
        if target.exists():
            raise _taken(target)
        return target

    @contextlib.contextmanager
    def _written(self, parts: Sequence[memoryview]) -> Iterator[tuple[Path, int]]:
        """A temporary file that holds `parts` and is still to be synced, gone afterwards; and its descriptor."""
        _make_folder(self._scratch)
        temporary = self._scratch / uuid.uuid4().hex
        try:
            with open(temporary, "xb", buffering=0) as file:
                _lock(file.fileno())
                write_out(file.fileno(), parts)
                yield temporary, file.fileno()
        finally:
            with contextlib.suppress(OSError):  # it may have another name; what is left here is swept
                temporary.unlink()

    def _name_once(self, temporary: Path, file: int, target: Path) -> None:
        try:
            with _unless_done(file, target):
                os.link(temporary, target)
        except OSError as error:
            if error.errno in NO_LINKS:
                self._rename_once(temporary, file, target)
            elif isinstance(error, FileExistsError) or target.exists():
                raise _taken(target) from error
            else:
                raise

    def _rename_once(self, temporary: Path, file: int, target: Path) -> None:
        """For file systems without hard links: creators take turns. One that is killed loses its turn."""
        with open(self._scratch / TURN, "ab") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if target.exists():
                raise _taken(target)
            with _unless_done(file, target):
                os.rename(temporary, target)


def _chunks(source: Path) -> Iterator[bytes]:
    with found(source), open(source, "rb", buffering=0) as whole:
        while chunk := whole.read(CHUNK):
            yield chunk


def _lock(file: int) -> None:
    """Lock a file: as its writer, or to find out that it has no living writer.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise  # else this file system has no locks, and only age tells


def _files(top: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(top, onerror=_unless_gone, followlinks=True):
        if SCRATCH in folders:
            folders.remove(SCRATCH)
        for name in names:
            yield Path(folder, name)


def _unless_gone(error: OSError) -> None:
    """A folder may vanish under a listing; one that cannot be read must not look empty."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _make_folder(folder: Path) -> None:
    """`mkdir -p`, each new name synced."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return  # a racing writer made it
    _sync_folder(folder.parent)


@contextlib.contextmanager
def _unless_done(file: int, target: Path) -> Iterator[None]:
    """A link or a rename may report a failure and have done its work: what counts is whether `file` lies there.

    A network file system repeats a request whose answer was lost, and answers that the name is taken.
    """
    try:
        yield
    except OSError:
        if not _lies_at(file, target):
            raise


def _lies_at(file: int, target: Path) -> bool:
    """Whether the name is that of an open file."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(target))
    except NO_FILE:
        return False
    except OSError as error:
        raise Unreachable(
            f"it is not known whether {target} was written ({error.strerror or error}): read it again"
        ) from error


def _taken(target: Path) -> Conflict:
    """Whoever gave it its name may have been killed before it was synced: what others build on is."""
    _sync_name(target)
    return Conflict(f"{target} exists")


def _sync_name(created: Path) -> None:
    """Others may have read it already: where this fails, nobody can say that nothing was written."""
    try:
        _sync_folder(created.parent)
    except OSError as error:
        raise Unreachable(
            f"{created} is there, and is not known to outlast a power cut ({error.strerror or error}): read it again"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
