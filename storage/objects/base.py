"""The object store contract: what every backend guarantees and nothing more.

A store is a flat map from relative paths ("log/0000000007.json") to immutable-by-habit
byte strings. Guarantees, each tested once for all backends in `tests/contracts/test_objects.py`:

- `create` is atomic put-if-absent: of any number of racing writers exactly one returns, the others get
  `Conflict`; a reader sees nothing or the whole object.
- `put` replaces atomically: a reader sees the old bytes or the new ones.
- What a completed write wrote survives a power cut, as far as the backend can tell.
- A read after a completed write sees that write (no cached listings, no cached existence).
- Content may be given in pieces (a header and views of tensors); they are written one after the other, uncopied.
- A store is a value (root and flags): picklable, cheap to build, safe to use from threads.

Paths are relative, use "/", and have no empty, "." or ".." part: none leads out of its store.
A bad one raises `ValueError`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Data = bytes | memoryview | Sequence[bytes | memoryview]

ABANDONED_SECONDS = 7 * 24 * 3600.0  # a writer that has been silent for so long is dead
CHUNK = 1 << 20  # bytes hashed and written at a time, while they are in the processor's cache


@dataclass(frozen=True, slots=True)
class Stat:
    """What the store knows of an object without reading it."""

    size: int  # bytes
    modified: float  # seconds since the epoch, by the store's clock


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a writer has begun and not finished: no object yet, and never one if the writer was killed."""

    name: str
    size: int  # bytes
    touched: float  # seconds since the epoch, by the store's clock: when it last grew
    token: str = ""  # the backend's own


def pieces(data: Data) -> list[memoryview]:
    """The buffers of `data` as views of bytes, in order."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [memoryview(part).cast("B") for part in parts]


def digest(parts: Sequence[memoryview]) -> str:
    """The sha256 of the pieces as one."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def checked(path: str) -> str:
    """Return `path` if it is a well-formed object path, else raise `ValueError`."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"not an object path: {path!r}")
    return path


class ObjectStore(ABC):
    """Named byte strings with atomic create. See the module's docstring for the guarantees."""

    patience: float | None = None  # how long one that does not answer is asked again (seconds); None: some minutes

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where this store lies, as a person would write it (`s3://bucket/prefix`, `/a/folder`)."""

    @abstractmethod
    def child(self, prefix: str) -> ObjectStore:
        """The same store, rooted at `prefix`."""

    @abstractmethod
    def put(self, path: str, data: Data) -> str:
        """Write or replace an object; returns the sha256 of its bytes.

        Raises:
            StoreFailed: the store takes no more writes; the object is as it was before.
            Unreachable: it is not known whether this call has written it, or not whether that outlasts a power cut.
        """

    @abstractmethod
    def create(self, path: str, data: Data) -> None:
        """Write an object that must not exist yet.

        Raises:
            Conflict: an object of that name exists (and was not written by this very call).
            StoreFailed: the store takes no more writes; there is no such object.
            Unreachable: it is not known whether this call has written it.
        """

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        """Write `file`, then `create` the object `path` that names it; returns the sha256 of `data`.

        `path` is never there without the whole `file`, even after a power cut.

        Args:
            content: what `path` holds, from the sha256 of `data`.
            file: a name that was never used before; a call that fails may leave a part of the file behind.

        Raises:
            Conflict, StoreFailed, Unreachable: as `create`. Where `content` has answered, a Conflict leaves the whole
                `file` there for good.
        """
        sha256 = self.put(file, data)
        self.create(path, content(sha256))
        return sha256

    @abstractmethod
    def get(self, path: str) -> bytes:
        """The whole object.

        Raises:
            Missing: there is none.
            Unreachable: it cannot be read now, which says nothing about it. So may every method that reads.
            Corrupt: its bytes are not those that were written, time and again (where the store can tell).
        """

    @abstractmethod
    def fetch(self, path: str, file: Path) -> str:
        """Copy the object into a new local file, piece by piece; returns its sha256. Raises as `get`."""

    @abstractmethod
    def stat(self, path: str) -> Stat:
        """Size and age of the object.

        Raises:
            Missing: there is none.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether the object exists now."""

    @abstractmethod
    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        """Paths of all objects below the folder `prefix` ("" for all), relative to the store, sorted; only those that
        sort behind `after`."""

    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders right below the folder `prefix`, sorted; a store may know them without listing all."""
        depth = prefix.count("/") + 1
        parts = (path.split("/") for path in self.list(prefix))
        return sorted({part[depth] for part in parts if len(part) > depth + 1})

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object, if there is one. After a power cut it may be there again."""

    def unfinished(self) -> Iterator[Unfinished]:
        """What is being written at the moment, and what killed writers left of that."""
        return iter(())

    def discard(self, left: Unfinished) -> None:  # noqa: B027 - nothing to do for a backend whose writers leave nothing
        """Remove what a killed writer left; a writer that is known to live keeps it."""

    @abstractmethod
    def check(self) -> None:
        """Prove with one probe object that the store can be written, read and deleted from.

        Raises:
            ConfigError: it cannot; the message names the address, the reason and the cure.
        """

    @property
    def waits(self) -> str:
        """The request that this process has waited for, if for long, in words; "" if nothing is late."""
        return ""

    def local_path(self, path: str) -> Path | None:
        """Where the object lies as a file on this machine, or None if it has to be fetched."""
        return None


def first_missing(store: ObjectStore, path: Callable[[int], str], start: int = 0) -> int:
    """The first number at or after `start` whose object does not exist, where existing numbers are contiguous.

    Probes names in growing strides, then halves: no listing, and few requests for a long chain.
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
