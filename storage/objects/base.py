"""The object store contract: what every backend guarantees and nothing more.

A store is a flat map from relative paths ("policies/00000007/manifest.json") to immutable-by-habit
byte strings. Guarantees, each tested once for all backends in `tests/contracts/test_objects.py`:

- `create` is atomic put-if-absent: of any number of racing writers exactly one returns, the others get
  `Conflict`; a reader sees nothing or the whole object.
- `put` replaces atomically: a reader sees the old bytes or the new ones.
- A read after a completed write sees that write (no cached listings, no cached existence).
- A store is a value (root and flags): picklable, cheap to build, safe to use from threads.

Paths are relative, use "/", and have no "." or ".." part; a bad one raises `ValueError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path


def checked(path: str) -> str:
    """Return `path` if it is a well-formed object path, else raise `ValueError`."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"not an object path: {path!r}")
    return path


class ObjectStore(ABC):
    """Named byte strings with atomic create. See the module's docstring for the guarantees."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where this store lies, as a person would write it (`s3://bucket/prefix`, `/a/folder`)."""

    @abstractmethod
    def child(self, prefix: str) -> ObjectStore:
        """The same store, rooted at `prefix`."""

    @abstractmethod
    def put(self, path: str, data: bytes | memoryview) -> None:
        """Write or replace an object."""

    @abstractmethod
    def create(self, path: str, data: bytes | memoryview) -> None:
        """Write an object that must not exist yet.

        Raises:
            Conflict: an object of that name exists (and was not written by this very call).
        """

    @abstractmethod
    def get(self, path: str) -> bytes:
        """The whole object.

        Raises:
            Missing: there is none.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether the object exists now."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Paths of all objects below the folder `prefix` ("" for all), relative to the store, sorted."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object; removing a missing one does nothing."""

    @abstractmethod
    def check(self) -> None:
        """Prove with one probe object that the store can be written, read and deleted from.

        Raises:
            ConfigError: it cannot; the message names the address, the reason and the cure.
        """

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
