"""The policy store: the chain of policy versions is the run's ledger.

Publishing version v is one atomic create of `policies/<v>/manifest.json`, after every object it names is up.
The manifest commits together the weights, the learner's state, the batch that was trained on, the dispatches
consumed and discarded, the prompt cursor and the sha256 of its parent's manifest. Two learners cannot both
publish v: the second gets `Conflict`.

Objects lie under a name of their writer's own (`policies/<v>/<writer>/...`), so that a learner that loses the
race has overwritten nothing. Manifests are never deleted; retention removes only objects, and only those of
versions that `Retention` does not keep.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore, first_missing
from rollflow.storage.records import Discard, DiscardReason, GroupKey

FORMAT = 1
FETCHED_KEPT = 3  # versions a cache of fetched weights holds


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object a manifest names."""

    path: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions keep their objects: the newest `keep_last`, every `keep_every`-th, and version 0."""

    keep_last: int = 5
    keep_every: int = 10

    def keeps(self, version: int, latest: int) -> bool:
        """Whether the objects of `version` must still be there when `latest` is the newest version."""
        return version > latest - self.keep_last or version % self.keep_every == 0


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
    cursor: int = 0
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
        body["discarded"] = [[*d.key, d.reason.value, d.started_version, d.response_tokens] for d in self.discarded]
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Manifest:
        """Parse a manifest; `Corrupt` if it is not one this version reads."""
        try:
            body = json.loads(data)
            if body.pop("format") != FORMAT:
                raise Corrupt(f"{name} was written by another version of rollflow; use that one to read it")
            body["weights"] = tuple(StoredObject(**o) for o in body["weights"])
            body["learner"] = tuple(StoredObject(**o) for o in body["learner"])
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

    def __init__(self, run: ObjectStore, retention: Retention | None = None, writer: str | None = None) -> None:
        self.run = run
        self.retention = retention or Retention()
        self.writer = writer or uuid.uuid4().hex[:12]

    def stage(self, version: int, files: Mapping[str, bytes | memoryview]) -> tuple[StoredObject, ...]:
        """Upload objects of a version that is not published yet; names like "weights/model.safetensors"."""
        staged = []
        for name, data in files.items():
            path = f"policies/{version:08d}/{self.writer}/{name}"
            self.run.put(path, data)
            staged.append(StoredObject(path, len(data), hashlib.sha256(data).hexdigest()))
        return tuple(staged)

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

    def read(self, stored: StoredObject) -> bytes:
        """An object, checked against its manifest; `Corrupt` if it is missing or differs."""
        try:
            data = self.run.get(stored.path)
        except Missing as error:
            raise Corrupt(f"{stored.path} is missing") from error
        if len(data) != stored.size or hashlib.sha256(data).hexdigest() != stored.sha256:
            raise Corrupt(f"{stored.path} is not what its manifest committed (sha256 or size differs)")
        return data

    def weights_folder(self, manifest: Manifest, cache: Path) -> Path:
        """A local folder of the version's safetensors files: the store's own, or fetched into `cache` and checked."""
        local = self.run.local_path(manifest.weights[0].path)
        if local is not None:
            return local.parent
        folder = cache / f"{manifest.version:08d}-{manifest.writer}"
        for old in sorted(cache.glob("*-*"))[: -FETCHED_KEPT + 1]:
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for stored in manifest.weights:
            (folder / Path(stored.path).name).write_bytes(self.read(stored))
        return folder

    def _prune(self, latest: int) -> None:
        """Remove the objects of the one version that `latest` pushed out of retention."""
        version = latest - self.retention.keep_last
        if version < 0 or self.retention.keeps(version, latest):
            return
        manifest = self.manifest(version)
        for stored in (*manifest.weights, *manifest.learner):
            self.run.delete(stored.path)
