"""Publishes, finds, reads and prunes the policy versions of a run. A policy version is published by one log entry,
which is written after every object that the entry names.

The log entry of a policy version commits three things together: the weights, the learner's state, and the batch that
was trained on. The log entry of a policy version names the log entry of the batch that the version was trained on. The
log entry of a batch lists the groups in the batch and the groups that were discarded. The path of a policy version's
object (`policies/<v>/<claim>/...`) contains the number of the log entry by which the learner claimed its role. A
learner that was replaced by a newer process can therefore overwrite nothing. Several objects of a policy version are
transferred at a time, and every read is checked against the sha256 in the version's log entry.

A run's state contains the log entry number of each policy version that may still be pruned. Older policy versions are
found by bisection of the log, because each log entry records the newest version at the time of that entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import Body, Entry, Pruned, VersionPublished
from rollflow.storage.log.lineage import find_version
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.log.retention import Kind, Retention
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import Data, ObjectStore, split_buffers
from rollflow.storage.objects.disk import map_file, sha256_of
from rollflow.storage.objects.node_cache import HeldFolder, NodeCache
from rollflow.storage.records import StoredObject

Item = TypeVar("Item")
Result = TypeVar("Result")

MOVERS = 4  # number of stored objects that are hashed and transferred at a time

Put = Callable[[str, ObjectStore, str], StoredObject]  # (name, store, path) -> the stored object


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published version."""

    number: int
    entry: int  # the log entry that published this policy version
    claim: int  # log entry by which the learner that published this policy version claimed the role
    at: float  # seconds since the epoch, by the learner's clock
    batch_entry: int | None  # log entry of the batch that this policy version was trained on; None for version 0
    weights: tuple[StoredObject, ...]
    state: tuple[StoredObject, ...]
    probe: tuple[float, ...]  # log-probs (nats) of the run's `probe_tokens` under these weights
    metrics: Mapping[str, float]
    code_version: str

    @classmethod
    def of(cls, entry: Entry) -> PolicyVersion:
        """Build a policy version from the log entry that published the version."""
        body = entry.body
        assert isinstance(body, VersionPublished)
        fields = (body.batch_entry, body.weights, body.state, body.probe, body.metrics, body.code_version)
        return cls(body.number, entry.n, entry.claim, entry.at, *fields)

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """The stored objects of the policy version: the weights and the learner's state."""
        return (*self.weights, *self.state)

    @property
    def sha256(self) -> str:
        """The sha256 of the concatenated hashes of the weight files; for a single file, this is not the file's own
        hash.
        """
        return hashlib.sha256("".join(stored.sha256 for stored in self.weights).encode()).hexdigest()


class PolicyStore:
    """Publishes, finds, reads and prunes the policy versions of one run, as the module's docstring describes."""

    def __init__(self, log: Log, in_use: Callable[[int], bool] = lambda version: False) -> None:
        """Open the policy store. The weights of a policy version are not pruned while `in_use(version)` returns
        true."""
        self.log, self.store, self._in_use = log, log.store, in_use
        self._held: HeldFolder | None = None  # the fetched weights of the last `weights_folder` call

    @property
    def retention(self) -> Retention:
        """The run's rules for which objects of policy versions are kept."""
        return self.log.state.retention

    # --- what is published --------------------------------------------------------------------------------------

    def stage(
        self, writer: Writer, version: int, files: Mapping[str, Data], movers: int = MOVERS, put: Put | None = None
    ) -> tuple[StoredObject, ...]:
        """Upload the objects of a policy version that is not published yet, under names such as
        "weights/model.safetensors".

        Args:
            movers: the number of objects that are uploaded at a time.
            put: a function that stores one object; if `put` is given, the method does not read the contents of `files`.
        """

        def staged(name: str) -> StoredObject:
            path = f"policies/{version:08d}/{writer.claim}/{name}"
            return put(name, self.store, path) if put else put_object(self.store, path, files[name])

        return tuple(map_concurrently(staged, files, movers))

    def publish(self, writer: Writer, version: VersionPublished) -> PolicyVersion:
        """Commit a version.

        Raises:
            Deposed: another process is the run's learner now.
            EntryRefused: the policy version is not the next one, or the batch that it was trained on was voided
            meanwhile.
        """

        def body(state: RunState, _: object) -> Body:
            return version

        return PolicyVersion.of(writer.append(body))

    def prune(self, writer: Writer) -> tuple[tuple[int, Kind], ...]:
        """Delete stored objects that the retention rules no longer require, after recording this in the log; return the
        policy versions and kinds of the deleted objects.

        If the log entry of a policy version cannot be read, the version's objects are not deleted, but the objects of
        other versions are.
        """
        released = self.log.state.releasable
        waiting = dict.fromkeys(version for version, kind in released if kind == "weights")
        used = {v for v, is_used in zip(waiting, map_concurrently(self._in_use, waiting), strict=True) if is_used}
        free = [(version, kind) for version, kind in released if kind == "state" or version not in used]
        found = {one: paths for one in free if (paths := self._paths_of(*one)) is not None}
        if objects := tuple(found):
            writer.append(lambda state, _: Pruned(objects))
            map_concurrently(self.store.delete, [path for several in found.values() for path in several])
        return objects

    def _paths_of(self, version: int, kind: Kind) -> list[str] | None:
        try:
            found = self.find(version)
        except (Missing, Corrupt):
            return None
        return [stored.path for stored in (found.weights if kind == "weights" else found.state)]

    # --- what there is ------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """Read new log entries, and return the number of the newest policy version, or -1 if there is none."""
        self.log.follow()
        return self.log.state.version

    def find(self, version: int) -> PolicyVersion:
        """Find a published version.

        Raises:
            Missing: the run has no policy version of this number.
            Corrupt: a log entry that the search reads is damaged.
        """
        if version > self.log.state.version:
            self.log.follow()
        return PolicyVersion.of(find_version(self.log, version).entry)

    def since(self, version: int) -> Iterator[PolicyVersion]:
        """Yield every policy version from `version` on, up to the last log entry that was read."""
        if version <= self.log.state.version:
            first = find_version(self.log, version).entry.n
            for stored in iterate_written(self.log, first, self.log.state.n):
                if isinstance(stored.entry.body, VersionPublished):
                    yield PolicyVersion.of(stored.entry)

    # --- what it consists of ------------------------------------------------------------------------------------

    def read(self, stored: StoredObject) -> memoryview:
        """Read a stored object and check its hash against the log entry that names the object; a local object is
        memory-mapped.

        Raises:
            Corrupt: the stored object is missing, or its hash differs from the hash in the log entry.
        """
        local = self.store.local_path(stored.path)
        try:
            data = map_file(local) if local is not None else memoryview(self.store.get(stored.path))
        except Missing as error:
            raise Corrupt(f"{stored.path} is missing") from error
        _check(stored, len(data), hashlib.sha256(data).hexdigest())
        return data

    def file(self, stored: StoredObject, folder: Path) -> Path:
        """Return a local file of a stored object, checked against the log entry: the store's own file, or a copy in
        `folder`.

        Raises:
            Corrupt: the stored object is missing, or its hash differs from the hash in the log entry.
        """
        path = self.store.local_path(stored.path)
        try:
            if path is not None:
                sha256 = sha256_of(path)
            else:
                path = folder / stored.path.replace("/", "-")
                sha256 = self.store.fetch(stored.path, path)
        except Missing as error:
            raise Corrupt(f"{stored.path} is missing") from error
        _check(stored, path.stat().st_size, sha256)
        return path

    def weights_folder(self, version: PolicyVersion, cache: Path) -> Path:
        """Return a local folder with the safetensors files of a policy version: the store's own folder, or a fetched
        copy.

        Each machine checks the hashes of the weight files once. The argument `cache` is the cache folder that all
        processes and runs of a machine share. A fetched copy of the weights is kept until this method is called for
        another policy version.
        """
        local = self.store.local_path(version.weights[0].path)
        name = f"{version.number:08d}-{version.sha256[:12]}"
        node = NodeCache(cache, self.store.uri, self.store.patience)
        # weight files are used in place; an empty folder in the cache records that their hashes were checked
        if local is not None:
            node.hold(name, lambda _: self._check_all(version), lambda _: _is_complete(local.parent, version))
            return local.parent
        self._held = node.hold(
            name, lambda folder: self.copy_weights(version, folder), lambda f: _is_complete(f, version)
        )
        return self._held.folder

    def _check_all(self, version: PolicyVersion) -> None:
        map_concurrently(self.read, version.weights)

    def check_kept(self, version: PolicyVersion) -> None:
        """Raise `Missing` unless all weight files of the policy version exist in storage; the files are not read."""
        for stored in version.weights:
            if not self.store.exists(stored.path):
                raise Missing(f"there is no object {stored.path}")

    def has_weights(self, version: PolicyVersion) -> bool:
        """Return whether all weight files of a policy version exist in storage; they may have been pruned before
        `keep_last` was raised."""
        return all(self.store.exists(stored.path) for stored in version.weights)

    def copy_weights(self, version: PolicyVersion, folder: Path) -> None:
        """Copy the weights of a policy version into a local folder, and check the hashes of the copies.

        Raises:
            Corrupt: a weight file is missing, or its hash differs from the hash in the log entry.
        """

        def copied(stored: StoredObject) -> None:
            file = folder / Path(stored.path).name
            try:
                sha256 = self.store.fetch(stored.path, file)
            except Missing as error:
                raise Corrupt(f"{stored.path} is missing") from error
            _check(stored, file.stat().st_size, sha256)

        map_concurrently(copied, version.weights)


def put_object(store: ObjectStore, path: str, data: Data) -> StoredObject:
    """Write an object to storage, and return the record by which a log entry names the object."""
    parts = split_buffers(data)
    return StoredObject(path, sum(map(len, parts)), store.put(path, parts))


def map_concurrently(work: Callable[[Item], Result], items: Iterable[Item], movers: int = MOVERS) -> list[Result]:
    """Apply the function `work` to all items, several at a time; return the results in the order of the items."""
    listed = list(items)
    if len(listed) < 2:
        return [work(item) for item in listed]
    with ThreadPoolExecutor(movers) as pool:
        return list(pool.map(work, listed))


def _check(stored: StoredObject, size: int, sha256: str) -> None:
    if (size, sha256) != (stored.size, stored.sha256):
        raise Corrupt(f"{stored.path} does not contain what its entry committed (the sha256 or the size differs)")


def _is_complete(folder: Path, version: PolicyVersion) -> bool:
    """Return whether all weight files of a policy version exist in a folder and have the sizes that the log records.
    The hashes of weight files are checked when the files are fetched. Later damage changes the log-probs of the probe
    tokens, which are compared after each weight update.
    """
    try:
        return all((folder / Path(stored.path).name).stat().st_size == stored.size for stored in version.weights)
    except FileNotFoundError:
        return False
