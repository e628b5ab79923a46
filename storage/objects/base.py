"""Defines the interface of an object store, which maps relative paths such as `log/0000000007.json` to byte strings.
The suite `tests/contracts/test_objects.py` tests the guarantees of a store on every backend.

The method `create` is an atomic put-if-absent: one of several racing writers succeeds, and the others get `Conflict`.
The method `put` replaces an object atomically. A reader sees a whole object or no object. A completed write survives a
power cut, as far as the backend can ensure it. A read after a completed write sees that write, because a store does not
cache listings or the existence of objects.

A store contains only an address and options, so it can be pickled and shared by threads. An object path has no empty,
`.` or `..` part, so no path leads out of the store. An invalid path raises `ValueError`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Data = bytes | memoryview | Sequence[bytes | memoryview]

ABANDONED_SECONDS = 7 * 24 * 3600.0  # seconds without progress after which an unfinished write counts as abandoned
CHUNK = 1 << 20  # number of bytes that are hashed and written at a time, so that they stay in the processor's cache


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """The metadata of a stored object, which is available without reading the object."""

    size: int  # bytes
    modified: float  # time of the object's last write, in seconds since the epoch by the store's clock


@dataclass(frozen=True, slots=True)
class UnfinishedWrite:
    """A write of an object that has begun and is not finished. If the writing process was killed, the unfinished write
    never becomes an object."""

    name: str
    size: int  # bytes
    touched: float  # the time when the write last grew, in seconds since the epoch by the store's clock
    token: str = ""  # the id by which the backend identifies the write


def split_buffers(data: Data) -> list[memoryview]:
    """Return the buffers that make up the content `data`, in order, as memory views of bytes."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [memoryview(part).cast("B") for part in parts]


def hash_pieces(parts: Sequence[memoryview]) -> str:
    """Return the sha256 of the concatenated buffers."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def check_path(path: str) -> str:
    """Return `path` if it is a well-formed object path, else raise `ValueError`."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"{path!r} is not a valid path of an object: a part of it is empty, '.' or '..', or it contains a NUL "
            "character"
        )
    return path


class ObjectStore(ABC):
    """A store of named byte strings. The module's docstring lists the guarantees of every object store."""

    # seconds for which a request to an unresponsive store is retried; None: a few minutes
    patience: float | None = None

    @property
    @abstractmethod
    def uri(self) -> str:
        """The address of the object store, as a user writes it (`s3://bucket/prefix`, `/a/folder`)."""

    @abstractmethod
    def child(self, prefix: str) -> ObjectStore:
        """Return an object store that contains only the objects of this store below the path `prefix`."""

    @abstractmethod
    def put(self, path: str, data: Data) -> str:
        """Write or replace an object; return the sha256 of its bytes.

        Raises:
            StoreFailed: the store refuses writes, and the object is unchanged.
            Unreachable: it is unknown whether this call wrote the object, or whether the write survives a power cut.
        """

    @abstractmethod
    def create(self, path: str, data: Data) -> None:
        """Write an object that must not exist yet.

        Raises:
            Conflict: another call has already written an object of this name.
            StoreFailed: the store refuses writes, and the object does not exist.
            Unreachable: it is unknown whether this call wrote the object.
        """

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        """Write `data` to the path `file`, then create the object `path`, whose content names `file`; return the sha256
        of `data`.

        The object `path` never exists without the complete object `file`, even after a power cut.

        Args:
            content: a function that returns the content of the object `path`, given the sha256 of `data`.
            file: a path that was never used before. A failed call may leave an incomplete file at this path.

        Raises:
            Conflict, StoreFailed, Unreachable: the same errors as those of `create`. If `Conflict` is raised after
            `content` was called, the complete object `file` is stored durably.
        """
        sha256 = self.put(file, data)
        self.create(path, content(sha256))
        return sha256

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Read the whole object.

        Raises:
            Missing: the object does not exist.
            Unreachable: the object cannot be read now, but may be undamaged. Every method that reads may raise this
                error.
            Corrupt: the bytes that were read differ from the written bytes; only a store with checksums detects this.
        """

    @abstractmethod
    def fetch(self, path: str, file: Path) -> str:
        """Copy the object into a new local file in chunks; return the object's sha256. The method raises the same
        errors as `get`.
        """

    @abstractmethod
    def stat(self, path: str) -> ObjectStat:
        """Return the size of the object and the time of its last write.

        Raises:
            Missing: the object does not exist.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether the object exists now."""

    @abstractmethod
    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        """List the paths of all objects below the folder `prefix` ("" for all), relative to the store and sorted.

        Only paths that come after `after` in sorted order are listed.
        """

    def folders(self, prefix: str) -> Sequence[str]:
        """List the names of the folders directly below the folder `prefix`, sorted."""
        depth = prefix.count("/") + 1
        parts = (path.split("/") for path in self.list(prefix))
        return sorted({part[depth] for part in parts if len(part) > depth + 1})

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object if it exists. A removed object may exist again after a power cut."""

    def list_unfinished(self) -> Iterator[UnfinishedWrite]:
        """List the writes in progress, and the unfinished writes of killed processes."""
        return iter(())

    def discard(self, left: UnfinishedWrite) -> None:  # noqa: B027 - nothing to do for a backend whose writers leave nothing
        """Remove an unfinished write that the writing process has abandoned."""

    @abstractmethod
    def check(self) -> None:
        """Check that objects can be written, read and deleted in the store, by doing so with one small object.

        Raises:
            ConfigError: the store cannot be used; the message names the address, the reason and the fix.
        """

    @property
    def waits(self) -> str:
        """A description of this process's oldest pending request, or "" unless that request has waited for a long
        time.
        """
        return ""

    def local_path(self, path: str) -> Path | None:
        """Return the path of the object's file on this machine, or None if the object must be fetched first."""
        return None


def first_missing(store: ObjectStore, path: Callable[[int], str], start: int = 0) -> int:
    """Return the first number from `start` on for which no object exists; the numbers of existing objects must be
    contiguous.

    The search needs few requests even for a long sequence, because it doubles its steps and then bisects.
    """
    if not store.exists(path(start)):
        return start
    low, stride = start, 1
    while store.exists(path(low + stride)):
        low, stride = low + stride, stride * 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if store.exists(path(middle)):
            low = middle
        else:
            high = middle
    return high
