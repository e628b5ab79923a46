"""Objects that entries name: read, and compared with their entries, several at a time."""

from __future__ import annotations

import hashlib
import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log import rows
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.finite import first_nonfinite
from rollflow.storage.log.report import Rows, Violation
from rollflow.storage.log.retention import Kind
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.disk import found
from rollflow.storage.records import StoredObject

AT_ONCE = 16  # objects that are read
MOST_BYTES = 1 << 30  # of the objects that are read at once, unless one alone has more


@dataclass(frozen=True, slots=True)
class Named:
    """An object that entry `entry` names, and what it belongs to."""

    stored: StoredObject
    entry: int
    kind: Kind | Literal["batch", "run"]
    version: int = -1  # whose it is; of a batch: the newest one when it was committed
    needed: bool = True  # else it may be gone
    batch: BatchCommitted | None = None
    rules: rows.Rules | None = None  # of a batch: the rules that were in force then


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found out about an object."""

    named: Named
    size: int = 0  # bytes that were read
    there: bool = True
    violations: tuple[Violation, ...] = ()
    rows: Rows | None = None


def look(run: ObjectStore, named: Named) -> Looked:
    """Read an object and compare it with the entry that names it."""
    path = named.stored.path
    try:
        size, sha256, data = _bytes(run, path, whole=named.batch is not None)
    except Missing:
        wrong = Violation("missing", path, f"it is missing, entry {named.entry} names it")
        return Looked(named, there=False, violations=(wrong,) if named.needed else ())
    except Corrupt as error:
        return Looked(named, violations=(Violation("altered", path, str(error)),))
    if (size, sha256) != (named.stored.size, named.stored.sha256):
        what = f"it has {size} bytes with sha256 {sha256[:12]}, entry {named.entry} names {named.stored.size} with "
        return Looked(named, size, violations=(Violation("altered", path, f"{what}{named.stored.sha256[:12]}"),))
    if named.batch is not None:
        return _look_inside(named, named.batch, data)
    if named.kind == "weights" and named.rules and named.rules.asked.limits:
        return Looked(named, size, violations=_check_weights(run, path))
    return Looked(named, size)


def _check_weights(run: ObjectStore, path: str) -> tuple[Violation, ...]:
    """Check that weights are finite. A file on this machine is memory-mapped; the index of several files has none."""
    if path.endswith(".json"):
        return ()
    local = run.local_path(path)
    try:
        if local is None:
            name = first_nonfinite(run.get(path))
        else:
            with found(local), open(local, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                name = first_nonfinite(data)
    except (ValueError, Missing, Corrupt) as error:
        return (Violation("altered", path, f"it holds no weights: {error}"),)
    return () if name is None else (Violation("lineage", path, f"tensor {name} has a number that is not finite"),)


def _look_inside(named: Named, body: BatchCommitted, data: bytes) -> Looked:
    assert named.rules is not None
    path = named.stored.path
    try:
        batch = TrajectoryBatch.from_bytes(data)
    except Corrupt as error:
        return Looked(named, len(data), violations=(Violation("altered", path, str(error)),))
    wrong = tuple(Violation(kind, path, what) for kind, what in rows.compare(batch, body, named.version, named.rules))
    return Looked(named, len(data), violations=wrong, rows=rows.counted(batch, body.number))


def _bytes(run: ObjectStore, path: str, *, whole: bool) -> tuple[int, str, bytes]:
    """Size and sha256 of an object, and its bytes where they are asked for."""
    local = run.local_path(path)
    if whole or local is None:
        data = run.get(path)
        return len(data), hashlib.sha256(data).hexdigest(), data if whole else b""
    with found(local), open(local, "rb", buffering=0) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256, b""


class Looking:
    """Looks at objects in threads. The results are handed on in the caller's thread, in the order of the objects."""

    def __init__(self, store: ObjectStore, done: Callable[[Looked], None]) -> None:
        self.store, self.done = store, done
        self._pool = ThreadPoolExecutor(AT_ONCE, "audit")
        self._under_way: deque[tuple[int, Future[Looked]]] = deque()
        self._bytes = 0

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *of: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, named: Named) -> None:
        """Look at one more, once there is room for it."""
        size = named.stored.size
        while len(self._under_way) >= 2 * AT_ONCE or (self._under_way and self._bytes + size > MOST_BYTES):
            self._take()
        self._bytes += size
        self._under_way.append((size, self._pool.submit(look, self.store, named)))

    def finish(self) -> None:
        """Wait for those that are under way."""
        while self._under_way:
            self._take()

    def _take(self) -> None:
        size, looked = self._under_way.popleft()
        self.done(looked.result())
        self._bytes -= size
