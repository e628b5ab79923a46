"""Defines an object store in this process's memory, for tests and simulation.

All in-memory stores of the same name in one process share their objects, in all threads. Two processes share no store.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollflow.storage.errors import ConfigError, Conflict, Missing
from rollflow.storage.objects.base import Data, ObjectStat, ObjectStore, check_path, hash_pieces, split_buffers
from rollflow.storage.objects.disk import raise_store_failed

_OBJECTS: dict[str, tuple[bytes, float]] = {}  # maps "name/path" to the content and the time of the write
_LOCK = threading.Lock()


@dataclass(frozen=True)
class MemoryStore(ObjectStore):
    """An object store in this process's memory, which contains the objects below `name` ("name" or "name/prefix")."""

    name: str

    @property
    def uri(self) -> str:
        return f"memory://{self.name}"

    def child(self, prefix: str) -> MemoryStore:
        return MemoryStore(self._key(prefix))

    def put(self, path: str, data: Data) -> str:
        parts = split_buffers(data)
        with _LOCK:
            _OBJECTS[self._key(path)] = (b"".join(parts), time.time())
        return hash_pieces(parts)

    def create(self, path: str, data: Data) -> None:
        key, body = self._key(path), b"".join(split_buffers(data))
        with _LOCK:
            if key in _OBJECTS:
                raise Conflict(f"memory://{key} exists already, and an existing object is never overwritten")
            _OBJECTS[key] = (body, time.time())

    def get(self, path: str) -> bytes:
        return self._entry(path)[0]

    def fetch(self, path: str, file: Path) -> str:
        body = self.get(path)
        with raise_store_failed(file), open(file, "xb") as copy:
            copy.write(body)
        return hashlib.sha256(body).hexdigest()

    def stat(self, path: str) -> ObjectStat:
        body, modified = self._entry(path)
        return ObjectStat(len(body), modified)

    def exists(self, path: str) -> bool:
        key = self._key(path)
        with _LOCK:
            return key in _OBJECTS

    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        below = f"{self._key(prefix) if prefix else self.name}/"
        with _LOCK:
            keys = [key for key in _OBJECTS if key.startswith(below)]
        names = (key.removeprefix(f"{self.name}/") for key in keys)
        return iter(sorted(name for name in names if name > after))

    def delete(self, path: str) -> None:
        key = self._key(path)
        with _LOCK:
            _OBJECTS.pop(key, None)

    def check(self) -> None:
        if not self.name:
            raise ConfigError(f"store.uri = {self.uri!r} does not name a store; write memory:// followed by a name")

    def _entry(self, path: str) -> tuple[bytes, float]:
        key = self._key(path)
        with _LOCK:
            if key not in _OBJECTS:
                raise Missing(f"the object memory://{key} does not exist")
            return _OBJECTS[key]

    def _key(self, path: str) -> str:
        return f"{self.name}/{check_path(path)}"
