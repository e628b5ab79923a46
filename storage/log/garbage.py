"""Garbage of a run: objects that nothing in its log needs, found by name.

    policies/<version>/<claim>/...    trajectories/<batch>-<claim>-...    log_index/<sha256>.json

- Objects lie under their writer's claim. If the claim is superseded, an object that no entry names is garbage at once:
  no entry of that claim can come any more. If the claim is live, it never is: its writer may be about to name the
  object.
- Pruned objects that are still there are garbage; what is named and not pruned never is.
- An index object has no claim in its name. If no entry names it, it goes when it is a week old. So does what a writer
  began and never finished (a temporary file, an upload in parts).
- An object whose writer is not known stays. In a log that does not fold, nothing is garbage.

The log is read after the objects are listed, so that an object that was named in between counts as named. Ages are by
the store's own clock.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import INDEX, BatchCommitted, Claimed, Pruned, RunCreated, VersionPublished, Written
from rollflow.storage.log.reading import entries
from rollflow.storage.log.report import ViolationKind
from rollflow.storage.log.retention import Kind
from rollflow.storage.log.state import RunState
from rollflow.storage.log.tolerant_fold import Refold
from rollflow.storage.objects.base import ABANDONED_SECONDS, ObjectStore, Unfinished
from rollflow.storage.records import StoredObject

PLACES = (re.compile(r"policies/\d+/(\d+)/.+"), re.compile(r"trajectories/\d+-(\d+)-.+"))
FOLDERS = ("policies", "trajectories", INDEX)

UNNAMED = "no entry names it, its writer was superseded"
PRUNED = "version {version} does not need its {kind} any more"
NO_INDEX = "no entry has it as its index"
ABANDONED = "its writer never ended it"


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that can go."""

    path: str
    size: int  # bytes
    age: float  # seconds
    why: str
    left: Unfinished | None = None  # what it is, if it never became an object


def store_clock(run: ObjectStore) -> float:
    """What the store's clock says now, in seconds since the epoch: the time of a write."""
    probe = f"probe-{uuid.uuid4().hex}"
    run.put(probe, b"")
    try:
        return run.stat(probe).modified
    finally:
        run.delete(probe)


def orphans(run: ObjectStore, now: float, older_than_seconds: float = 0.0) -> list[Orphan]:
    """The run's orphans that are at least so old at `now` (see `store_clock`), by path.

    Raises:
        Corrupt: the log does not fold, so that nothing can be said.
    """
    listed = [path for folder in FOLDERS for path in run.list(folder)]
    names = _Names.read(run)
    found = [*abandoned(run, now, older_than_seconds)]
    for path in listed:
        if (why := names.verdict(path)) is None:
            continue
        least = max(older_than_seconds, ABANDONED_SECONDS if why == NO_INDEX else 0.0)
        try:
            stat = run.stat(path)
        except Missing:
            continue  # it was just pruned and removed
        if now - stat.modified >= least:
            found.append(Orphan(path, stat.size, now - stat.modified, why))
    return sorted(found, key=lambda orphan: orphan.path)


def abandoned(run: ObjectStore, now: float, older_than_seconds: float = 0.0) -> Iterator[Orphan]:
    """What writers began and never finished, if it has not grown for so long, and for longer than a living writer
    pauses.
    """
    oldest = now - max(older_than_seconds, ABANDONED_SECONDS)
    for left in run.unfinished():
        if left.touched < oldest:
            yield Orphan(left.name, left.size, now - left.touched, ABANDONED, left)


def collect(run: ObjectStore, found: Iterable[Orphan]) -> int:
    """Remove orphans; returns the bytes that came free."""
    freed = 0
    for orphan in found:
        if orphan.left:
            run.discard(orphan.left)
        else:
            run.delete(orphan.path)
        freed += orphan.size
    return freed


def sweep(run: ObjectStore) -> int:
    """Remove what writers began and never finished; returns the bytes that came free. Runs do this by themselves."""
    return collect(run, list(abandoned(run, store_clock(run))))


@dataclass(slots=True)
class _Names:
    """What the log says about the names of objects."""

    live: set[int] = field(default_factory=set)  # entries of claims that hold
    superseded: set[int] = field(default_factory=set)  # and of those that do not
    named: dict[str, tuple[int, Kind] | None] = field(default_factory=dict)  # path -> the version's part that it is
    pruned: set[tuple[int, Kind]] = field(default_factory=set)
    indexes: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, run: ObjectStore) -> _Names:
        """From the whole log; `Corrupt` if it does not fold."""
        names, wrong = cls(), list[str]()

        def add(kind: ViolationKind, where: str, what: str) -> None:
            wrong.append(f"{where}: {what}")

        fold = Refold(run, RunState(), add)
        claims = set()
        for written, data, _ in fold.over(entries(run, to_the_last=True)):
            names._note(written, data)
            if isinstance(written.entry.body, Claimed):
                claims.add(written.entry.n)
            if not fold.sound:
                break
        if not fold.sound:
            fold.close()
            raise Corrupt(f"nothing is garbage by a log that does not fold: {wrong[-1]}")
        names.live = {claim.entry for claim in fold.state.claims.values()}
        names.superseded = claims - names.live
        return names

    def verdict(self, path: str) -> str | None:
        """Why an object can go; None if it stays."""
        if path in self.named:
            part = self.named[path]
            return PRUNED.format(version=part[0], kind=part[1]) if part and part in self.pruned else None
        if path.startswith(f"{INDEX}/"):
            return None if path in self.indexes else NO_INDEX
        claim = next((int(match[1]) for place in PLACES if (match := place.fullmatch(path))), -1)
        return UNNAMED if claim in self.superseded else None

    def _note(self, written: Written, data: bytes) -> None:
        index = json.loads(data).get("index")
        if index is not None:
            self.indexes.add(index["path"])
        match written.entry.body:
            case RunCreated(policy=policy):
                self._name(policy, None)
            case BatchCommitted(file=file):
                self._name((file,), None)
            case VersionPublished(number, weights=weights, state=state):
                self._name(weights, (number, "weights"))
                self._name(state, (number, "state"))
            case Pruned(objects):
                self.pruned.update(objects)

    def _name(self, objects: Iterable[StoredObject], part: tuple[int, Kind] | None) -> None:
        """Note an object's name. What two entries name, neither may prune."""
        for stored in objects:
            self.named[stored.path] = None if stored.path in self.named else part
