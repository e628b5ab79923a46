"""The policy store: the chain of policy versions is the run's ledger.

Publishing version v is one atomic create of `policies/<v>/manifest.json`, after every object it names is up.
The manifest commits together the weights, the learner's state, the batch that was trained on, the dispatches
consumed and discarded, the prompt sources' cursors and the sha256 of its parent's manifest. Two learners cannot both
publish v: the second gets `Conflict`.

Objects lie under a name of their writer's own (`policies/<v>/<writer>/...`), so that a learner that loses the
race has overwritten nothing. They move several at a time, and every read is checked against the manifest's sha256.
Manifests are never deleted; retention removes only objects, and only those of versions that `Retention` says
nobody needs: neither as weights, nor to continue the run from, nor to train a kept version again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollflow.storage.errors import Corrupt, Missing, StoreFailed, Unreachable
from rollflow.storage.node_cache import Held, NodeCache
from rollflow.storage.objects.base import Data, ObjectStore, first_missing, pieces
from rollflow.storage.objects.disk import mapped
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey, StoredObject

Item = TypeVar("Item")
Result = TypeVar("Result")

FORMAT = 2
MOVERS = 4  # objects that are hashed and moved at a time


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions keep their objects: the newest `keep_last`, every `keep_every`-th, version 0, and their bases.

    The base of a version is the newest one at or before it that stored the learner's state, as every
    `state_every`-th does. From the base of version v - 1 and the batches after it, version v can be trained again.
    """

    keep_last: int = 5
    keep_every: int = 10
    state_every: int = 1

    def keeps(self, version: int, latest: int) -> bool:
        """Whether a person may count on the weights of `version` when `latest` is the newest version."""
        return version > latest - self.keep_last or version % self.keep_every == 0

    def stores_state(self, version: int) -> bool:
        """Whether `version` is published with the learner's state."""
        return version % self.state_every == 0

    def base(self, version: int) -> int:
        """The newest version at or before `version` that has the learner's state."""
        return version - version % self.state_every

    def needed(self, version: int, latest: int) -> bool:
        """Whether the objects of `version` must be there: it is kept, or the base of a kept or future one's parent.

        Once false it stays false as `latest` grows.
        """
        if self.keeps(version, latest):
            return True
        last = version + self.state_every  # the last version that is trained again from this one
        in_window, kept_for_good = last > latest - self.keep_last, last // self.keep_every > version // self.keep_every
        return self.stores_state(version) and (in_window or kept_for_good)

    def released(self, latest: int) -> list[int]:
        """The versions whose objects were needed until `latest` was published."""
        ended = sorted({latest - self.keep_last, latest - self.keep_last - self.state_every})
        return [v for v in ended if v >= 0 and self.needed(v, latest - 1) and not self.needed(v, latest)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What version `version` is, and all that went into it."""

    version: int
    parent: str | None  # sha256 of the parent's manifest; None for version 0
    weights: tuple[StoredObject, ...]
    learner: tuple[StoredObject, ...]
    batch: str | None  # sha256 of the commit of batch `version - 1`; None for version 0
    consumed: tuple[GroupKey, ...] = ()
    discarded: tuple[Discard, ...] = ()
    cursor: Cursor = field(default_factory=Cursor)
    probe: tuple[float, ...] = ()  # the learner's log-probs (nats) of the run's probe tokens under these weights
    metrics: Mapping[str, float] = field(default_factory=dict)
    config_sha256: str = ""
    code_version: str = ""
    writer: str = ""
    created_at: float = 0.0  # seconds since the epoch, by the writer's clock

    def to_json(self) -> bytes:
        """The object that is committed."""
        body: dict[str, Any] = {"format": FORMAT, **{name: getattr(self, name) for name in self.__slots__}}
        body["weights"] = [asdict(o) for o in self.weights]
        body["learner"] = [asdict(o) for o in self.learner]
        body["metrics"] = dict(self.metrics)
        body["cursor"] = asdict(self.cursor)
        body["discarded"] = [[*d.key, d.reason.value, d.started_version, d.response_tokens] for d in self.discarded]
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Manifest:
        """Parse a manifest; `Corrupt` if it is not one this version reads."""
        try:
            body = json.loads(data)
            if (found := body.pop("format")) != FORMAT:
                raise Corrupt(
                    f"{name} has format {found}, this version of rollflow reads format {FORMAT}; it was written by "
                    f"rollflow {body.get('code_version') or '(unknown)'}: use that one to read it"
                )
            body["weights"] = tuple(StoredObject(**o) for o in body["weights"])
            body["learner"] = tuple(StoredObject(**o) for o in body["learner"])
            body["cursor"] = Cursor.of(body["cursor"])
            body["consumed"] = tuple(GroupKey(*k) for k in body["consumed"])
            body["discarded"] = tuple(
                Discard(GroupKey(i, a), DiscardReason(why), started, tokens)
                for i, a, why, started, tokens in body["discarded"]
            )
            body["probe"] = tuple(body["probe"])
            return cls(**body)
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{name} is not a manifest: {error}") from error


def manifest_path(version: int) -> str:
    """Where the manifest of `version` lies."""
    return f"policies/{version:08d}/manifest.json"


class PolicyStore:
    """Publishes and reads the policy versions of one run. See the module's docstring for the guarantees."""

    def __init__(
        self,
        run: ObjectStore,
        retention: Retention | None = None,
        writer: str | None = None,
        in_use: Callable[[int], bool] = lambda version: False,
    ) -> None:
        """Objects of a version that is `in_use` stay until it is not, whatever `retention` says."""
        self.run = run
        self.retention = retention or Retention()
        self.writer = writer or uuid.uuid4().hex[:12]
        self.in_use = in_use
        self._put_off: list[int] = []  # versions past retention that were in use
        self._held: Held | None = None  # the fetched weights that were asked for last

    def stage(self, version: int, files: Mapping[str, Data]) -> tuple[StoredObject, ...]:
        """Upload objects of a version that is not published yet; names like "weights/model.safetensors"."""

        def staged(name: str) -> StoredObject:
            path, parts = f"policies/{version:08d}/{self.writer}/{name}", pieces(files[name])
            return StoredObject(path, sum(map(len, parts)), self.run.put(path, parts))

        return tuple(each(staged, files))

    def publish(self, manifest: Manifest) -> str:
        """Commit a version; returns the sha256 of its manifest.

        Raises:
            Conflict: the version was published by another learner; this one must stop.
        """
        data = manifest.to_json()
        self.run.create(manifest_path(manifest.version), data)
        self._prune(manifest.version)
        return hashlib.sha256(data).hexdigest()

    def published(self, version: int) -> bool:
        """Whether `version` exists."""
        return self.run.exists(manifest_path(version))

    def latest(self, start: int = 0) -> int:
        """The newest published version, -1 if there is none; `start` is one known to exist (or 0)."""
        return first_missing(self.run, manifest_path, start) - 1

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version; `Missing` or `Corrupt`."""
        path = manifest_path(version)
        return Manifest.from_json(self.run.get(path), path)

    def manifest_sha256(self, version: int) -> str:
        """What the manifest of `version + 1` names as its parent."""
        return hashlib.sha256(self.run.get(manifest_path(version))).hexdigest()

    def read(self, stored: StoredObject) -> memoryview:
        """An object, checked against its manifest; `Corrupt` if it is missing or differs. A local one is mapped."""
        local = self.run.local_path(stored.path)
        try:
            data = mapped(local) if local is not None else memoryview(self.run.get(stored.path))
        except Missing as error:
            raise Corrupt(f"{stored.path} is missing") from error
        _check(stored, len(data), hashlib.sha256(data).hexdigest())
        return data

    def read_all(self, objects: Iterable[StoredObject]) -> dict[str, memoryview]:
        """`read` of several objects at a time, by path."""
        listed = list(objects)
        return dict(zip([stored.path for stored in listed], each(self.read, listed), strict=True))

    def weights_folder(self, manifest: Manifest, cache: Path) -> Path:
        """A local folder of the version's safetensors files, checked once a node: the store's own, or fetched.

        `cache` is the node's, for all its processes and runs. What was fetched stays until this object is asked for
        another version.
        """
        local = self.run.local_path(manifest.weights[0].path)
        name = f"{manifest.version:08d}-{manifest.writer}"
        node = NodeCache(cache, self.run.uri, self.run.patience)
        if local is not None:  # an empty folder says that the store's own was checked
            node.hold(name, lambda _: self._check_all(manifest), lambda _: _whole(local.parent, manifest))
            return local.parent
        self._held = node.hold(name, lambda folder: self.copy_weights(manifest, folder), lambda f: _whole(f, manifest))
        return self._held.folder

    def _check_all(self, manifest: Manifest) -> None:
        self.read_all(manifest.weights)

    def check_kept(self, manifest: Manifest) -> None:
        """Raise `Missing` unless all weights of the version are in storage; reads none of them."""
        for stored in manifest.weights:
            if not self.run.exists(stored.path):
                raise Missing(f"there is no object {stored.path}")

    def copy_weights(self, manifest: Manifest, folder: Path) -> None:
        """Copy the version's weights into a local folder, hashed on their way.

        Raises:
            Corrupt: one is missing, or not what was committed.
        """

        def copied(stored: StoredObject) -> None:
            file = folder / Path(stored.path).name
            try:
                sha256 = self.run.fetch(stored.path, file)
            except Missing as error:
                raise Corrupt(f"{stored.path} is missing") from error
            _check(stored, file.stat().st_size, sha256)

        each(copied, manifest.weights)

    def _prune(self, latest: int) -> None:
        """Remove the objects that `latest` pushed out of retention; what is left by a failure is for `collect`."""
        with contextlib.suppress(Missing, Corrupt, Unreachable, StoreFailed):
            released = [*self._put_off, *self.retention.released(latest)]
            self._put_off = [version for version in released if self.in_use(version)]
            for version in sorted({*released} - {*self._put_off}):
                manifest = self.manifest(version)
                each(self.run.delete, [stored.path for stored in (*manifest.weights, *manifest.learner)])


def each(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`work` on all items, several at a time, in order."""
    listed = list(items)
    if len(listed) < 2:
        return [work(item) for item in listed]
    with ThreadPoolExecutor(MOVERS) as pool:
        return list(pool.map(work, listed))


def _check(stored: StoredObject, size: int, sha256: str) -> None:
    if (size, sha256) != (stored.size, stored.sha256):
        raise Corrupt(f"{stored.path} is not what its manifest committed (sha256 or size differs)")


def _whole(folder: Path, manifest: Manifest) -> bool:
    """Whether all files are there. They were hashed when they were fetched; the engines' probe would tell of damage."""
    try:
        return all((folder / Path(stored.path).name).stat().st_size == stored.size for stored in manifest.weights)
    except FileNotFoundError:
        return False
