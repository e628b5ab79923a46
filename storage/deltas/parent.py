"""Stores the weights of a new policy version as deltas: differences to the weights of the previous version, the parent.

    new weights --compare--> copy of the parent's weights --changes--> delta --> store
                                 |<------ the copy becomes the new weights ------+

- The copy of the parent's weights is in memory, and takes as many bytes as the weight files.
- The copy is used only if it belongs to the previous version, and if its sha256 is that of the published file. Without
  such a copy, files are stored whole.
- A process that dies after it stored objects and before it appended the log entry leaves objects that no entry names.
  The next learner begins with the published weights that it has restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollflow.storage.deltas.delta_file import encode_delta
from rollflow.storage.objects.base import Data, ObjectStore, hash_pieces, split_buffers
from rollflow.storage.records import DELTA, StoredObject

NO_VERSION = -1


@dataclass(slots=True)
class ParentFile:
    """A copy of a weight file of the parent version, and the sha256 of the file."""

    data: bytearray
    sha256: str


@dataclass(slots=True)
class StoredWeights:
    """The weight files of a policy version that is not published yet, and the deltas among the stored objects."""

    weights: tuple[StoredObject, ...]
    deltas: tuple[StoredObject, ...] = ()


@dataclass(slots=True)
class ParentWeights:
    """Copies of the weight files of the newest policy version.

    The object is not thread-safe, but `put` may be called for several files at a time.
    """

    full_every: int = 1
    _version: int = NO_VERSION
    _files: dict[str, ParentFile] = field(default_factory=dict)
    _deltas: list[StoredObject] = field(default_factory=list)

    def forget(self) -> None:
        """Forget the parent's weights, so that the next policy version is stored whole."""
        self._version, self._files = NO_VERSION, {}

    def take(self, version: int, files: Mapping[str, Data], published: Mapping[str, StoredObject]) -> None:
        """Copy the weight files of a published policy version, which is the parent of the next version.

        Files that differ from the published files are not copied.
        """
        self.forget()
        if self.full_every == 1:
            return
        for name, data in files.items():
            if name in published and hash_pieces(parts := split_buffers(data)) == published[name].sha256:
                self._copy(name, parts, published[name].sha256)
        self._version = version

    def begin(self, version: int) -> int:
        """Prepare to store the weight files of policy version `version`; return the version of the copied weights.

        Until `end` is called, the copies belong to no version, because storing may fail half-way.
        """
        parent, self._version, self._deltas = self._version, NO_VERSION, []
        if parent != version - 1:
            self._files = {}
        return parent

    def end(self, version: int) -> tuple[StoredObject, ...]:
        """Note that all weight files of policy version `version` are stored; return the deltas."""
        self._version = version
        return tuple(sorted(self._deltas, key=lambda stored: stored.path))

    def put(self, version: int, name: str, data: Data, store: ObjectStore, path: str) -> StoredObject:
        """Store a weight file, as a delta if this is possible and smaller; return the record of the weight file."""
        parts, parent = split_buffers(data), self._files.get(name)
        size = sum(map(len, parts))
        if parent is not None and version % self.full_every != 0:
            made = encode_delta(memoryview(parent.data), parent.sha256, parts)
            if made is not None:
                delta, encoded = made
                sha256 = store.put(path + DELTA, encoded)
                self._deltas.append(StoredObject(path + DELTA, len(encoded), sha256))
                parent.sha256 = delta.result
                return StoredObject(path, size, delta.result)
        sha256 = store.put(path, parts)
        if self.full_every > 1:
            self._copy(name, parts, sha256)
        return StoredObject(path, size, sha256)

    def _copy(self, name: str, parts: Sequence[memoryview], sha256: str) -> None:
        size, kept = sum(map(len, parts)), self._files.get(name)
        data = kept.data if kept is not None and len(kept.data) == size else bytearray(size)
        start = 0
        for part in parts:
            data[start : start + len(part)] = part
            start += len(part)
        self._files[name] = ParentFile(data, sha256)
