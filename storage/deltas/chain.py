"""Rebuilds a weight file from a whole file of an earlier policy version and the deltas of the versions since.

    whole file of version 8 --delta of 9--> --delta of 10--> --delta of 11--> file of version 11, checked by its sha256

The whole file is copied, and the deltas change the memory-mapped copy in place. The process therefore needs memory only
for the deltas. The log entry of the version contains the sha256 of the result, which proves that the whole chain is
intact.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from rollflow.storage.deltas.delta_file import read_delta
from rollflow.storage.deltas.update_folder import keep_delta, link_deltas
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.disk import map_file, raise_missing, raise_store_failed, sha256_of
from rollflow.storage.records import StoredObject


class VersionWithDeltas(Protocol):
    """A published policy version, some of whose weight files may be stored as deltas."""

    @property
    def number(self) -> int:
        """The number of the policy version."""

    @property
    def weights(self) -> Sequence[StoredObject]:
        """The weight files."""

    def find_delta(self, stored: StoredObject) -> StoredObject | None:
        """Return the delta from which a weight file is rebuilt; None if the file is stored whole."""


Version = TypeVar("Version", bound=VersionWithDeltas)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A delta of a weight file, with the policy version to which the delta leads."""

    version: int
    delta: StoredObject
    file: StoredObject  # the weight file that results from the delta


@dataclass(frozen=True, slots=True)
class FileChain:
    """The objects from which a weight file is read: a whole file, and the deltas that change it into `file`."""

    file: StoredObject  # the weight file, as its log entry describes it
    whole: StoredObject  # the whole file; equal to `file` if the file is stored whole
    links: tuple[ChainLink, ...] = ()  # in the order in which the deltas are applied

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """All stored objects of the chain: the whole file and the deltas."""
        return (self.whole, *(link.delta for link in self.links))

    def begins_by(self, version: int) -> bool:
        """Return whether the chain contains the file of policy version `version`."""
        return bool(self.links) and self.links[0].version <= version + 1

    def list_ways(self) -> Iterator[FileChain]:
        """Yield this chain, and then shorter chains for the same file. A shorter chain begins with the whole file of a
        later version, which the learner stores in place of a damaged delta."""
        yield self
        for number in reversed(range(len(self.links))):
            yield replace(self, whole=self.links[number].file, links=self.links[number + 1 :])

    def after(self, version: int) -> FileChain:
        """Return the part of the chain that begins with the file of policy version `version`."""
        return replace(self, links=tuple(link for link in self.links if link.version > version))


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A local copy of the weight file of policy version `version`."""

    version: int
    path: Path


def find_chain(version: Version, stored: StoredObject, parent_of: Callable[[Version], Version]) -> FileChain:
    """Return the chain (whole file and deltas) of a weight file of a policy version; `parent_of` returns the previous
    version.

    Raises:
        Corrupt: an earlier version has no weight file of this name.
    """
    links, whole = list[ChainLink](), stored
    while (delta := version.find_delta(whole)) is not None:
        links.append(ChainLink(version.number, delta, whole))
        version, name = parent_of(version), name_of(whole)
        found = next((one for one in version.weights if name_of(one) == name), None)
        if found is None:
            raise Corrupt(
                f"the delta {delta.path} changes the file {name} of version {version.number}, but this version "
                "has no such file"
            )
        whole = found
    return FileChain(stored, whole, tuple(reversed(links)))


def name_of(stored: StoredObject) -> str:
    """Return the name under which an object of a policy version was stored (`policies/<version>/<claim>/<name>`).

    A path of another form, which an altered log entry may contain, is accepted.
    """
    return stored.path.split("/", 3)[-1]


def write_file(
    store: ObjectStore, chain: FileChain, target: Path, earlier: CachedFile | None = None, keep: Path | None = None
) -> Path:
    """Write the weight file of a chain to the new file `target`, check its sha256, and return `target`.

    Args:
        earlier: a local copy of the file of an earlier policy version. If the chain contains that version, the file is
            rebuilt from this copy.
        keep: the folder in which the deltas are kept for engines.

    Raises:
        Corrupt: an object that is needed is missing or damaged.
    """
    if earlier is not None and chain.begins_by(earlier.version):
        with contextlib.suppress(Corrupt):  # the earlier file may have been damaged since its sha256 was checked
            _rebuild(store, chain.after(earlier.version), target, earlier.path, keep)
            if keep is not None:
                link_deltas(earlier.path.parent, keep, target.name)
            return target
    first: Corrupt | None = None
    for way in chain.list_ways():
        if first is not None and not store.exists(way.whole.path):
            continue
        try:
            return _rebuild(store, way, target, None, keep)
        except Corrupt as error:
            first = first or error
    assert first is not None
    raise first


def fetch_object(store: ObjectStore, stored: StoredObject, target: Path) -> Path:
    """Copy a stored object to the new local file `target`, check its sha256, and return `target`.

    Raises:
        Corrupt: the object is missing, or its bytes differ from those that the log entry names.
    """
    target.unlink(missing_ok=True)  # a rebuild may have failed half-way
    try:
        sha256 = store.fetch(stored.path, target)
    except Missing as error:
        raise Corrupt(f"the object {stored.path} is missing") from error
    check_object(stored, target.stat().st_size, sha256)
    return target


def fetch_delta(store: ObjectStore, stored: StoredObject) -> memoryview:
    """Read a delta's bytes and check their sha256.

    Raises:
        Corrupt: the delta is missing, or its bytes differ from those that the log entry names.
    """
    local = store.local_path(stored.path)
    try:
        data = map_file(local) if local is not None else memoryview(store.get(stored.path))
    except Missing as error:
        raise Corrupt(f"the object {stored.path} is missing") from error
    check_object(stored, len(data), hashlib.sha256(data).hexdigest())
    return data


def apply_deltas(deltas: Iterable[tuple[StoredObject, memoryview]], target: memoryview) -> None:
    """Apply deltas, one after the other, to the file `target`; raise `Corrupt` if a delta does not fit the file."""
    for stored, data in deltas:
        try:
            read_delta(data).apply(target)
        except ValueError as error:
            raise Corrupt(
                f"the delta {stored.path} cannot be applied to the file of the version before: {error}"
            ) from error


def check_object(stored: StoredObject, size: int, sha256: str) -> None:
    """Raise `Corrupt` unless an object has the size and the sha256 that its log entry names."""
    if (size, sha256) != (stored.size, stored.sha256):
        raise Corrupt(
            f"{stored.path} does not have the content that its log entry names (the sha256 or the size differs)"
        )


def _rebuild(store: ObjectStore, chain: FileChain, target: Path, base: Path | None, keep: Path | None) -> Path:
    if not chain.links:
        return fetch_object(store, chain.file, target)
    deltas = [(link, fetch_delta(store, link.delta)) for link in chain.links]
    local = base or store.local_path(chain.whole.path)
    if local is None:
        fetch_object(store, chain.whole, target)
    else:
        try:
            with raise_missing(local), raise_store_failed(target):
                shutil.copyfile(local, target)
        except Missing as error:
            raise Corrupt(f"the object {chain.whole.path} is missing") from error
    # an empty file cannot be memory-mapped
    if (size := target.stat().st_size) == 0 or size != chain.file.size:
        raise Corrupt(
            f"{chain.whole.path} has {size} bytes, but must have {chain.file.size} bytes so that "
            f"{chain.file.path} can be rebuilt from it"
        )
    with open(target, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped) as view:
        apply_deltas(((link.delta, data) for link, data in deltas), view)
    check_object(chain.file, size, sha256_of(target))
    if keep is not None:
        with raise_store_failed(target):
            for link, data in deltas:
                keep_delta(keep, link.version, target.name, data)
    return target
