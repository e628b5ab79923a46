"""Finds and removes the garbage of a run: stored objects that the run's log does not need, identified by their paths.

    policies/<version>/<claim>/...    trajectories/<batch>-<claim>-...    log_index/<sha256>.json

- The path of an object contains a claim: the number of the log entry by which the object's writer claimed its role. If
  a newer process has claimed the role, an object that no entry names is garbage at once, because the older writer can
  append no more entries. An object with the newest claim of a role is never garbage, because the writer may be about to
  append an entry that names the object.
- A pruned object that still exists is garbage. An object that a log entry names and that was not pruned is never
  garbage.
- The path of an index object contains no claim. An index object that no entry names is garbage once it is a week old.
  An unfinished write (a temporary file, a multipart upload) is garbage at the same age.
- An object whose writer is unknown is kept. If the log is damaged, no object counts as garbage.

The log is read after the objects are listed, so an object that an entry names in the meantime is not garbage. Ages are
measured by the store's clock.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollflow.storage.audit.report import ViolationKind
from rollflow.storage.audit.tolerant_fold import TolerantFold
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import (
    INDEX,
    BatchCommitted,
    Claimed,
    Pruned,
    RunCreated,
    VersionPublished,
    WrittenEntry,
)
from rollflow.storage.log.reading import read_entries
from rollflow.storage.log.retention import Kind
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import ABANDONED_SECONDS, ObjectStore, UnfinishedWrite
from rollflow.storage.records import StoredObject

PLACES = (re.compile(r"policies/\d+/(\d+)/.+"), re.compile(r"trajectories/\d+-(\d+)-.+"))
FOLDERS = ("policies", "trajectories", INDEX)

UNNAMED = "no entry names the object, and its writer was superseded"
PRUNED = "version {version} no longer needs its {kind}"
NO_INDEX = "no entry names this index"
ABANDONED = "its writer never finished writing it"


@dataclass(frozen=True, slots=True)
class Orphan:
    """A stored object or an unfinished write that can be removed as garbage."""

    path: str
    size: int  # bytes
    age: float  # seconds
    why: str
    left: UnfinishedWrite | None = None  # set if the object to remove is an unfinished write


def store_clock(run: ObjectStore) -> float:
    """Return the time of the store's clock (seconds since the epoch), which is read by writing a small object."""
    probe = f"probe-{uuid.uuid4().hex}"
    run.put(probe, b"")
    try:
        return run.stat(probe).modified
    finally:
        run.delete(probe)


def list_orphans(run: ObjectStore, now: float, older_than_seconds: float = 0.0) -> list[Orphan]:
    """List, by path, the stored objects that no log entry needs and that are at least `older_than_seconds` old at time
    `now`.

    Raises:
        Corrupt: the log is damaged, so it is unknown which objects the log needs.
    """
    listed = [path for folder in FOLDERS for path in run.list(folder)]
    names = _Names.read(run)
    found = [*list_abandoned(run, now, older_than_seconds)]
    for path in listed:
        if (why := names.verdict(path)) is None:
            continue
        least = max(older_than_seconds, ABANDONED_SECONDS if why == NO_INDEX else 0.0)
        try:
            stat = run.stat(path)
        except Missing:
            continue  # the object was removed after the listing
        if now - stat.modified >= least:
            found.append(Orphan(path, stat.size, now - stat.modified, why))
    return sorted(found, key=lambda orphan: orphan.path)


def list_abandoned(run: ObjectStore, now: float, older_than_seconds: float = 0.0) -> Iterator[Orphan]:
    """List unfinished writes of objects that have not grown for `older_than_seconds` and for `ABANDONED_SECONDS`."""
    oldest = now - max(older_than_seconds, ABANDONED_SECONDS)
    for left in run.list_unfinished():
        if left.touched < oldest:
            yield Orphan(left.name, left.size, now - left.touched, ABANDONED, left)


def collect(run: ObjectStore, found: Iterable[Orphan]) -> int:
    """Remove stored objects that no log entry needs; return the number of freed bytes."""
    freed = 0
    for orphan in found:
        if orphan.left:
            run.discard(orphan.left)
        else:
            run.delete(orphan.path)
        freed += orphan.size
    return freed


def sweep(run: ObjectStore) -> int:
    """Remove unfinished writes that their writers have abandoned; return the number of freed bytes."""
    return collect(run, list(list_abandoned(run, store_clock(run))))


@dataclass(slots=True)
class _Names:
    """The paths of all stored objects that the entries of a run's log name."""

    live: set[int] = field(default_factory=set)  # log entries with the newest claim of each role
    superseded: set[int] = field(default_factory=set)  # log entries with older claims
    # maps a path to the policy version and kind of the object; None for objects that belong to no policy version
    named: dict[str, tuple[int, Kind] | None] = field(default_factory=dict)
    pruned: set[tuple[int, Kind]] = field(default_factory=set)
    indexes: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, run: ObjectStore) -> _Names:
        """Collect the paths of objects from all entries of the log; raise `Corrupt` if the log is damaged."""
        names, wrong = cls(), list[str]()

        def add(kind: ViolationKind, where: str, what: str) -> None:
            wrong.append(f"{where}: {what}")

        fold = TolerantFold(run, RunState(), add)
        claims = set()
        for written, data, _ in fold.over(read_entries(run, to_the_last=True)):
            names._note(written, data)
            if isinstance(written.entry.body, Claimed):
                claims.add(written.entry.n)
            if not fold.sound:
                break
        if not fold.sound:
            fold.close()
            raise Corrupt(f"garbage cannot be identified, because the run's log is damaged: {wrong[-1]}")
        names.live = {claim.entry for claim in fold.state.claims.values()}
        names.superseded = claims - names.live
        return names

    def verdict(self, path: str) -> str | None:
        """Return the reason why a stored object should be removed; return None if the object should be kept."""
        if path in self.named:
            part = self.named[path]
            return PRUNED.format(version=part[0], kind=part[1]) if part and part in self.pruned else None
        if path.startswith(f"{INDEX}/"):
            return None if path in self.indexes else NO_INDEX
        claim = next((int(match[1]) for place in PLACES if (match := place.fullmatch(path))), -1)
        return UNNAMED if claim in self.superseded else None

    def _note(self, written: WrittenEntry, data: bytes) -> None:
        index = json.loads(data).get("index")
        if index is not None:
            self.indexes.add(index["path"])
        match written.entry.body:
            case RunCreated(policy=policy, models=models):
                self._name((*policy, *models), None)
            case BatchCommitted(file=file):
                self._name((file,), None)
            case VersionPublished(number, weights=weights, state=state, deltas=deltas):
                self._name((*weights, *deltas), (number, "weights"))
                self._name(state, (number, "state"))
            case Pruned(objects):
                self.pruned.update(objects)

    def _name(self, objects: Iterable[StoredObject], part: tuple[int, Kind] | None) -> None:
        """Record the names of objects. An object that two log entries name is never removed as garbage."""
        for stored in objects:
            self.named[stored.path] = None if stored.path in self.named else part
