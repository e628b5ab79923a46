"""Garbage collection: objects of a run that nothing in its ledger needs any more, found by age and by name.

Orphans are what a killed or beaten writer left (objects that no manifest and no commit names), and what retention
would have removed, had its learner lived to do it. An object named by any manifest that retention needs, by any batch
commit, voided or not, or younger than the age that was asked for, is never one: whoever writes it may be about to
name it. The names are read after the listing, so what was named in between counts as named. What a writer began and
never ended (a temporary file, an upload in parts) goes when it has not grown for a week.

Ages are by the store's own clock, at both ends.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ABANDONED_SECONDS, ObjectStore, Unfinished
from rollflow.storage.policies import PolicyStore, Retention, manifest_path

UNNAMED_WEIGHTS = "no manifest names it"
UNNAMED_BATCH = "no batch commit names it"
RELEASED = "version {version} is past retention"
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


def orphans(
    run: ObjectStore,
    retention: Retention,
    older_than_seconds: float,
    now: float,
    in_use: Callable[[int], bool] = lambda version: False,
) -> list[Orphan]:
    """The run's orphans that are older than `older_than_seconds` at `now` (see `store_clock`), by path.

    `in_use` says of a version past retention that somebody still needs it (`PolicyStore.in_use`).
    """
    listed = {folder: list(run.list(folder)) for folder in ("policies", "trajectories")}
    of_policies = _policy_orphans(run, retention, listed["policies"], in_use)
    candidates = [*of_policies, *_batch_orphans(run, listed["trajectories"])]
    found = []
    for path, why in candidates:
        try:
            stat = run.stat(path)
        except Missing:
            continue  # retention has just removed it
        if now - stat.modified >= older_than_seconds:
            found.append(Orphan(path, stat.size, now - stat.modified, why))
    return sorted(chain(found, abandoned(run, older_than_seconds, now)), key=lambda orphan: orphan.path)


def abandoned(run: ObjectStore, older_than_seconds: float, now: float) -> list[Orphan]:
    """What writers began and never ended, if it has not grown for so long, and for longer than a living one pauses."""
    oldest = now - max(older_than_seconds, ABANDONED_SECONDS)
    return [
        Orphan(left.name, left.size, now - left.touched, ABANDONED, left)
        for left in run.unfinished()
        if left.touched < oldest
    ]


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
    """Remove what writers began and never ended; returns the bytes that came free. For nobody to have to ask for it."""
    return collect(run, abandoned(run, 0.0, store_clock(run)))


def _policy_orphans(
    run: ObjectStore, retention: Retention, paths: list[str], in_use: Callable[[int], bool]
) -> Iterator[tuple[str, str]]:
    """Objects of versions, each with why it can go. A version whose manifest cannot be read keeps all it has."""
    policies = PolicyStore(run)
    latest = policies.latest()
    objects: dict[int, list[str]] = {}
    for path in paths:
        name = path.split("/")[1]
        if name.isdigit() and path != manifest_path(int(name)):
            objects.setdefault(int(name), []).append(path)
    for version, stored in objects.items():
        try:
            manifest = policies.manifest(version)
        except Missing:
            yield from ((path, UNNAMED_WEIGHTS) for path in stored)
            continue
        except Corrupt:
            continue
        named = {o.path for o in (*manifest.weights, *manifest.learner)}
        yield from ((path, UNNAMED_WEIGHTS) for path in stored if path not in named)
        if not retention.needed(version, latest) and not in_use(version):
            yield from ((path, RELEASED.format(version=version)) for path in stored if path in named)


def _batch_orphans(run: ObjectStore, paths: list[str]) -> Iterator[tuple[str, str]]:
    """Files that no commit names. A commit that cannot be read, or is altered, keeps all files of its number."""
    named, unclear = set(), set()
    there = set(run.list("trajectories"))  # again: a commit may have come after its file was listed
    for path in sorted(p for p in there if p.endswith(".json")):
        try:
            file = str(json.loads(run.get(path)).get("file", ""))
        except Missing:
            continue
        except (ValueError, AttributeError, Corrupt):
            file = "unreadable"
        if file and file not in there:
            unclear.add(_number(path))
        named.add(file)
    for path in paths:
        if not path.endswith(".json") and path not in named and _number(path) not in unclear:
            yield path, UNNAMED_BATCH


def _number(path: str) -> str:
    """The batch number that an object's name begins with."""
    return path.rpartition("/")[2][:8]
