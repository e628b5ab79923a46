"""Publishes, finds, reads and prunes the policy versions of a run. A policy version is published by one log entry. This
entry is written after all objects that it names.

The log entry of a policy version commits three things together: the weights, the learner's state, and the batch that
was trained on. The log entry of a policy version names the log entry of the batch that the version was trained on. The
log entry of a batch lists the groups in the batch and the groups that were discarded. The path of a policy version's
object (`policies/<v>/<claim>/...`) contains the number of the log entry by which the learner claimed its role. A
learner that was replaced by a newer process can therefore overwrite nothing. Several objects of a policy version are
transferred at a time, and every read is checked against the sha256 in the version's log entry.

A run's state contains the log entry number of each policy version that may still be pruned. Older policy versions are
found by bisection of the log: each log entry records which version was the newest at the time of the entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from rollflow.storage.deltas.chain import CachedFile, FileChain, check_object, find_chain, write_file
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
from rollflow.storage.records import DELTA, StoredObject

Item = TypeVar("Item")
Result = TypeVar("Result")

MOVERS = 4  # number of stored objects that are hashed and transferred at a time

Put = Callable[[str, ObjectStore, str], StoredObject]  # (name, store, path) -> the stored object


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published policy version, as described by the log entry that published it."""

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
    deltas: tuple[StoredObject, ...] = ()  # deltas that are stored in place of whole weight files

    @classmethod
    def of(cls, entry: Entry) -> PolicyVersion:
        """Build a policy version from the log entry that published the version."""
        body = entry.body
        assert isinstance(body, VersionPublished)
        fields = (body.batch_entry, body.weights, body.state, body.probe, body.metrics, body.code_version)
        return cls(body.number, entry.n, entry.claim, entry.at, *fields, body.deltas)

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """The files of the policy version: the weights and the learner's state."""
        return (*self.weights, *self.state)

    @property
    def stored_weights(self) -> tuple[StoredObject, ...]:
        """The stored objects that hold the weights: for each weight file its delta, or the whole file."""
        return tuple(self.find_delta(stored) or stored for stored in self.weights)

    def find_delta(self, stored: StoredObject) -> StoredObject | None:
        """Return the delta from which a weight file is rebuilt; None if the file is stored whole."""
        return next((delta for delta in self.deltas if delta.path == stored.path + DELTA), None)

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

    # --- publishing and pruning ---------------------------------------------------------------------------------

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
        """Publish a policy version by appending its log entry.

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
        in_use = zip(waiting, map_concurrently(self._in_use, waiting), strict=True)
        # the weights of a version in use may be rebuilt from those of earlier versions
        first = self.retention.full_before
        used = {n for version, is_used in in_use if is_used for n in range(first(version), version + 1)}
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
        return [stored.path for stored in ((*found.weights, *found.deltas) if kind == "weights" else found.state)]

    # --- finding policy versions --------------------------------------------------------------------------------

    def newest(self) -> int:
        """Read new log entries, and return the number of the newest policy version, or -1 if there is none."""
        self.log.follow()
        return self.log.state.version

    def find(self, version: int) -> PolicyVersion:
        """Find a published policy version by its number.

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

    # --- reading the files of a policy version ------------------------------------------------------------------

    def read(self, stored: StoredObject) -> memoryview:
        """Read a file of a policy version and check its hash against the log entry that names the file; a local file is
        memory-mapped.

        Raises:
            Corrupt: an object that is needed is missing, or the hash of the file differs from that in the log entry.
        """
        if (chain := self._find_chain(stored)).links:
            with TemporaryDirectory() as folder:
                return map_file(write_file(self.store, chain, Path(folder, "file")))
        local = self.store.local_path(stored.path)
        try:
            data = map_file(local) if local is not None else memoryview(self.store.get(stored.path))
        except Missing as error:
            raise Corrupt(f"the object {stored.path} is missing") from error
        check_object(stored, len(data), hashlib.sha256(data).hexdigest())
        return data

    def file(self, stored: StoredObject, folder: Path) -> Path:
        """Return a local copy of a file of a policy version, checked against the log entry: the store's own file, or a
        file in `folder`.

        Raises:
            Corrupt: an object that is needed is missing, or the hash of the file differs from that in the log entry.
        """
        path, chain = self.store.local_path(stored.path), self._find_chain(stored)
        if path is None or chain.links:
            return write_file(self.store, chain, folder / stored.path.replace("/", "-"))
        try:
            sha256 = sha256_of(path)
        except Missing as error:
            raise Corrupt(f"the object {stored.path} is missing") from error
        check_object(stored, path.stat().st_size, sha256)
        return path

    def weights_folder(self, version: PolicyVersion, cache: Path) -> Path:
        """Return a local folder with the safetensors files of a policy version: the store's own folder, or a copy.

        Each machine checks the hashes of the weight files once. The argument `cache` is the cache folder that all
        processes and runs of a machine share. A copy of the weights is kept until this method is called for another
        policy version. If weights are stored as deltas (differences to the version before), the folder also contains
        the deltas (see the module `update_folder`). If the machine has the folder of an earlier version, the new folder
        is made from that folder.
        """
        local, name = self.store.local_path(version.weights[0].path), _folder_name(version)
        node = NodeCache(cache, self.store.uri, self.store.patience)
        # weight files are used in place; an empty folder in the cache records that their hashes were checked
        if local is not None and not version.deltas:
            node.hold(name, lambda _: self._check_all(version), lambda _: _is_complete(local.parent, version))
            return local.parent
        earlier = self._find_cached(node, version)
        self._held = node.hold(
            name,
            lambda folder: self._fill_folder(version, folder, earlier),
            lambda folder: _is_complete(folder, version),
        )
        return self._held.folder

    def _check_all(self, version: PolicyVersion) -> None:
        map_concurrently(self.read, version.weights)

    def _find_cached(self, node: NodeCache, version: PolicyVersion) -> tuple[int, HeldFolder] | None:
        """Return the newest earlier version whose weight files are in the machine's cache and from which `version` may
        be rebuilt by deltas.
        """
        while version.deltas:
            version = self._find_parent(version)
            if held := node.find(_folder_name(version), partial(_is_complete, version=version)):
                return version.number, held
        return None

    def _fill_folder(self, version: PolicyVersion, folder: Path, earlier: tuple[int, HeldFolder] | None) -> None:
        """Write the weight files of a policy version, and the deltas that lead to them, to an empty folder."""

        def written(stored: StoredObject) -> None:
            name = Path(stored.path).name
            cached = CachedFile(earlier[0], earlier[1].folder / name) if earlier else None
            write_file(self.store, self._find_chain(stored), folder / name, cached, folder)

        map_concurrently(written, version.weights)

    def check_kept(self, version: PolicyVersion) -> None:
        """Raise `Missing` unless storage has all objects from which the weight files of a policy version are read; the
        objects are not read."""
        for stored in version.weights:
            if not self._is_there(stored, self.store.exists):
                raise Missing(f"the object {stored.path} is missing, or an object from which it is rebuilt")

    def has_weights(self, version: PolicyVersion, exists: Callable[[str], bool] | None = None) -> bool:
        """Return whether storage has all objects from which the weight files of a policy version are read. Objects of
        old versions may have been pruned before the config key `keep_last` was raised.

        Args:
            exists: a function that returns whether storage contains the object at a path; by default, storage is asked.
        """
        return all(self._is_there(stored, exists or self.store.exists) for stored in version.weights)

    def _is_there(self, stored: StoredObject, exists: Callable[[str], bool]) -> bool:
        try:
            chain = self._find_chain(stored)
        except Corrupt:
            chain = FileChain(stored, stored)
        return any(all(exists(one.path) for one in way.objects) for way in chain.list_ways())

    def copy_weights(self, version: PolicyVersion, folder: Path) -> None:
        """Copy the weight files of a policy version into a local folder, and check the hashes of the copies.

        Raises:
            Corrupt: an object that is needed is missing, or the hash of a file differs from that in the log entry.
        """

        def copied(stored: StoredObject) -> None:
            write_file(self.store, self._find_chain(stored), folder / Path(stored.path).name)

        map_concurrently(copied, version.weights)

    def _find_chain(self, stored: StoredObject) -> FileChain:
        """Return the stored objects from which a file of a policy version is read."""
        if self.retention.full_every == 1:
            return FileChain(stored, stored)
        version = self.find(int(stored.path.split("/")[1]))
        return find_chain(version, stored, self._find_parent)

    def _find_parent(self, version: PolicyVersion) -> PolicyVersion:
        try:
            return self.find(version.number - 1)
        except Missing as error:
            raise Corrupt(
                f"the weights of version {version.number} cannot be rebuilt, because the version before is "
                f"unknown: {error}"
            ) from error


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


def _folder_name(version: PolicyVersion) -> str:
    return f"{version.number:08d}-{version.sha256[:12]}"


def _is_complete(folder: Path, version: PolicyVersion) -> bool:
    """Return whether all weight files of a policy version exist in a folder and have the sizes that the log records.
    The hashes of weight files are checked when the files are fetched. Later damage is detected after the next weight
    update, because it changes the log-probs of the probe tokens (fixed tokens whose log-probs are known for each
    version).
    """
    try:
        return all((folder / Path(stored.path).name).stat().st_size == stored.size for stored in version.weights)
    except FileNotFoundError:
        return False
