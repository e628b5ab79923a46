"""Checkpoint files of a sharded learner. The shards of a file are gathered only when the file is read, so that few
files are in memory at the same time.

`stage_files` lets several ranks gather and store checkpoint files at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from rollflow.storage.deltas.chain import name_of
from rollflow.storage.deltas.parent import ParentWeights, StoredWeights
from rollflow.storage.log.run_log import Writer
from rollflow.storage.objects.base import Data, ObjectStore
from rollflow.storage.policies import PolicyStore, Put
from rollflow.storage.records import StoredObject


class GatheredFiles(Mapping[str, Data]):
    """A mapping of file names to files of a sharded learner. A file is gathered from the ranks each time it is read. A
    gathered file is valid until one of its tensors changes."""

    def __init__(
        self, names: Iterable[str], gather: Callable[[str], Data], put: Put | None = None, movers: int = 1
    ) -> None:
        """Set the names of the files. `put` makes a rank store a file; `movers` is the number of files that are stored
        at the same time."""
        self._names, self._gather, self._turn = tuple(names), gather, threading.Lock()
        self.put, self.movers = put, movers

    def __getitem__(self, name: str) -> Data:
        if name not in self._names:
            raise KeyError(name)
        with self._turn:
            return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def stage_weights(
    policies: PolicyStore, writer: Writer, version: int, files: Mapping[str, Data], parent: ParentWeights
) -> StoredWeights:
    """Store the weight files of a policy version before the version is published. If possible, store the files as
    deltas to the files of the previous version.

    Files that several ranks store are not stored as deltas, because no rank has a copy of the whole weights.
    """
    if parent.full_every == 1 or isinstance(files, GatheredFiles):
        return StoredWeights(stage_files(policies, writer, version, files))

    def put(name: str, store: ObjectStore, path: str) -> StoredObject:
        return parent.put(version, name, files[name], store, path)

    parent.begin(version)
    stored = policies.stage(writer, version, files, put=put)
    return StoredWeights(stored, parent.end(version))


def stage_files(
    policies: PolicyStore, writer: Writer, version: int, files: Mapping[str, Data]
) -> tuple[StoredObject, ...]:
    """Store the weight and state files of a policy version before the policy version is published."""
    if isinstance(files, GatheredFiles):
        return policies.stage(writer, version, files, files.movers, files.put)
    return policies.stage(writer, version, files)


def copy_parent(
    parent: ParentWeights, version: int, weights: Callable[[], Mapping[str, Data]], published: Iterable[StoredObject]
) -> None:
    """Copy the weights of the restored policy version `version`, so that the next version can be stored as deltas."""
    if parent.full_every > 1 and not isinstance(files := weights(), GatheredFiles):
        parent.take(version, files, {name_of(stored): stored for stored in published})
