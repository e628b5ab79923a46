"""Simulates an object store behind a network: each request takes some time, and all transfers in one direction share a
link. The objects are in a local folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollflow.storage.objects.base import Data, ObjectStat, ObjectStore, split_buffers
from rollflow.storage.objects.local import LocalStore

SECONDS, BYTES_PER_SECOND = 0.03, 125e6  # duration of a request; rate of the link (1 Gbit/s)


@dataclass
class Link:
    """One direction of the network."""

    rate: float
    sent: int = 0  # bytes
    _free: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, size: int) -> None:
        """Wait until all earlier transfers are over, and then as long as it takes to send `size` bytes."""
        with self._lock:
            self.sent += size
            self._free = max(self._free, time.monotonic()) + size / self.rate
            end = self._free
        time.sleep(max(0.0, end - time.monotonic()))


class DistantStore(ObjectStore):
    """A store in a folder that answers as slowly as a store behind a network."""

    def __init__(self, folder: Path, seconds: float = SECONDS, rate: float = BYTES_PER_SECOND) -> None:
        self._store, self._seconds = LocalStore(folder), seconds
        self.up, self.down = Link(rate), Link(rate)

    @property
    def uri(self) -> str:
        return f"distant:{self._store.uri}"

    def child(self, prefix: str) -> ObjectStore:
        raise NotImplementedError

    def put(self, path: str, data: Data) -> str:
        self._send(sum(map(len, split_buffers(data))))
        return self._store.put(path, data)

    def create(self, path: str, data: Data) -> None:
        self._send(sum(map(len, split_buffers(data))))
        self._store.create(path, data)

    def get(self, path: str) -> bytes:
        found = self._store.get(path)
        self._receive(len(found))
        return found

    def fetch(self, path: str, file: Path) -> str:
        self._receive(self._store.stat(path).size)
        return self._store.fetch(path, file)

    def stat(self, path: str) -> ObjectStat:
        self._receive(0)
        return self._store.stat(path)

    def exists(self, path: str) -> bool:
        self._receive(0)
        return self._store.exists(path)

    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        self._receive(0)
        return self._store.list(prefix, after)

    def delete(self, path: str) -> None:
        self._send(0)
        self._store.delete(path)

    def check(self) -> None:
        self._store.check()

    def _send(self, size: int) -> None:
        time.sleep(self._seconds)
        self.up.send(size)

    def _receive(self, size: int) -> None:
        time.sleep(self._seconds)
        self.down.send(size)
