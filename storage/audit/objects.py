"""Reads the stored objects that log entries name, several at a time, and compares each object with its log entry."""

from __future__ import annotations

import hashlib
import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from rollflow.storage.audit import rows
from rollflow.storage.audit.finite import first_nonfinite
from rollflow.storage.audit.report import RowCounts, Violation
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.retention import Kind
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.disk import raise_missing
from rollflow.storage.records import DELTA, StoredObject

AT_ONCE = 16  # number of stored objects that are read at a time
# largest total size, in bytes, of the stored objects that are read at a time; a larger object is read alone
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class NamedObject:
    """A stored object that log entry `entry` names, and what the object contains."""

    stored: StoredObject
    entry: int
    kind: Kind | Literal["batch", "run"]
    # the policy version to which the object belongs; for a batch, the newest version at the batch's commit
    version: int = -1
    needed: bool = True  # false: the object may be missing, because it may have been pruned
    batch: BatchCommitted | None = None
    rules: rows.Rules | None = None  # the config's rules that applied to the object's log entry


@dataclass(frozen=True, slots=True)
class ObjectFinding:
    """The result of checking one stored object."""

    named: NamedObject
    size: int = 0  # the number of bytes of the object that were read
    there: bool = True  # the object exists
    violations: tuple[Violation, ...] = ()
    rows: RowCounts | None = None


def look(run: ObjectStore, named: NamedObject) -> ObjectFinding:
    """Read a stored object and compare the object with the log entry that names it."""
    path = named.stored.path
    try:
        size, sha256, data = _bytes(run, path, whole=named.batch is not None)
    except Missing:
        wrong = Violation("missing", path, f"the object is missing, but entry {named.entry} names it")
        return ObjectFinding(named, there=False, violations=(wrong,) if named.needed else ())
    except Corrupt as error:
        return ObjectFinding(named, violations=(Violation("altered", path, str(error)),))
    if (size, sha256) != (named.stored.size, named.stored.sha256):
        what = (
            f"the object has {size} bytes with sha256 {sha256[:12]}, but entry {named.entry} names "
            f"{named.stored.size} bytes with sha256 "
        )
        return ObjectFinding(named, size, violations=(Violation("altered", path, f"{what}{named.stored.sha256[:12]}"),))
    if named.batch is not None:
        return _look_inside(named, named.batch, data)
    if named.kind == "weights" and named.rules and named.rules.asked.limits:
        return ObjectFinding(named, size, violations=_check_weights(run, path))
    return ObjectFinding(named, size)


def _check_weights(run: ObjectStore, path: str) -> tuple[Violation, ...]:
    """Check that weights are finite. The JSON index of weight files contains no weights, so it is not searched. A file
    that is rebuilt from a delta is searched by the module `deltas`."""
    if path.endswith((".json", DELTA)):
        return ()
    local = run.local_path(path)
    try:
        if local is None:
            name = first_nonfinite(run.get(path))
        else:
            with (
                raise_missing(local),
                open(local, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                name = first_nonfinite(data)
    except (ValueError, Missing, Corrupt) as error:
        return (Violation("altered", path, f"the object is not a valid file of weights: {error}"),)
    return () if name is None else (Violation("lineage", path, f"tensor {name} has a NaN or an infinity"),)


def _look_inside(named: NamedObject, body: BatchCommitted, data: bytes) -> ObjectFinding:
    assert named.rules is not None
    path = named.stored.path
    try:
        batch = TrajectoryBatch.from_bytes(data)
    except Corrupt as error:
        return ObjectFinding(named, len(data), violations=(Violation("altered", path, str(error)),))
    wrong = tuple(Violation(kind, path, what) for kind, what in rows.compare(batch, body, named.version, named.rules))
    return ObjectFinding(named, len(data), violations=wrong, rows=rows.count_rows(batch, body.number))


def _bytes(run: ObjectStore, path: str, *, whole: bool) -> tuple[int, str, bytes]:
    """Return the size and sha256 of a stored object; if `whole` is true, also return the object's bytes."""
    local = run.local_path(path)
    if whole or local is None:
        data = run.get(path)
        return len(data), hashlib.sha256(data).hexdigest(), data if whole else b""
    with raise_missing(local), open(local, "rb", buffering=0) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256, b""


class ObjectChecks:
    """Checks stored objects in threads, and passes the results to `done` in the caller's thread, in the order of the
    objects."""

    def __init__(self, store: ObjectStore, done: Callable[[ObjectFinding], None]) -> None:
        self.store, self.done = store, done
        self._pool = ThreadPoolExecutor(AT_ONCE, "audit")
        self._under_way: deque[tuple[int, Future[ObjectFinding]]] = deque()
        self._bytes = 0

    def __enter__(self) -> ObjectChecks:
        return self

    def __exit__(self, *of: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, named: NamedObject) -> None:
        """Add a stored object to the queue of objects to check; wait while too many objects are pending."""
        size = named.stored.size
        while len(self._under_way) >= 2 * AT_ONCE or (self._under_way and self._bytes + size > MOST_BYTES):
            self._take()
        self._bytes += size
        self._under_way.append((size, self._pool.submit(look, self.store, named)))

    def finish(self) -> None:
        """Wait for all pending objects."""
        while self._under_way:
            self._take()

    def _take(self) -> None:
        size, looked = self._under_way.popleft()
        self.done(looked.result())
        self._bytes -= size
