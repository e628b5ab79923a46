"""Rebuilds the weight files that are stored as deltas, and compares each with the log entry of its policy version.

    full version 8 --delta of 9--> sha256 of version 9? --delta of 10--> sha256 of version 10? --> ...

A chain is a file that is stored whole, and the deltas of the versions after it. Each file is rebuilt once per chain,
and one file is in memory at a time. A chain is checked up to its newest policy version whose weights were not pruned.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rollflow.storage.audit.finite import first_nonfinite
from rollflow.storage.audit.report import Violation
from rollflow.storage.deltas.chain import apply_deltas, check_object, fetch_delta, name_of
from rollflow.storage.deltas.delta_file import read_delta
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import Entry, VersionPublished, decode, entry_path
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import DELTA, StoredObject


class WrongDelta(Exception):
    """A weight file cannot be rebuilt; the argument is the violation."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


@dataclass(slots=True)
class _KnownVersion:
    """A policy version as its log entry describes it. The fields map the name of a weight file to the file and to its
    delta."""

    files: dict[str, StoredObject]
    deltas: dict[str, StoredObject]

    @classmethod
    def of(cls, body: VersionPublished) -> _KnownVersion:
        stored = zip(body.weights, body.stored_weights, strict=True)
        deltas = {name_of(file): one for file, one in stored if one != file}
        return cls({name_of(file): file for file in body.weights}, deltas)


@dataclass(slots=True)
class DeltaChains:
    """The policy versions of a run whose weights are stored as deltas, and the versions that their deltas need."""

    store: ObjectStore
    _known: dict[int, _KnownVersion] = field(default_factory=dict)

    def note(self, entry: Entry) -> None:
        """Note the log entry of a policy version. If the version has deltas and the version before is unknown, the log
        is read backwards to the newest full version."""
        body = entry.body
        assert isinstance(body, VersionPublished)
        self._known[body.number] = _KnownVersion.of(body)
        if body.deltas and body.number - 1 not in self._known:
            with contextlib.suppress(Missing, Corrupt):  # an unreadable log entry is reported elsewhere
                self._read_back(entry)

    def check(self, is_kept: Callable[[int], bool], *, finite: bool) -> Iterator[tuple[int, Violation]]:
        """Rebuild all weight files of kept policy versions that are stored as deltas; yield the violations, each with
        the number of its policy version.

        Args:
            is_kept: a function that returns whether the weights of a policy version were not pruned.
            finite: if true, the rebuilt weights must be finite.
        """
        kept = [number for number, known in self._known.items() if known.deltas and is_kept(number)]
        for number in sorted(kept):
            for name in self._known[number].deltas:
                if not self._continues(number, name, kept):
                    yield from self._check_file(number, name, finite)

    def is_replaced(self, version: int, stored: StoredObject) -> bool:
        """Return whether `stored` is a delta of policy version `version`, and the learner stored the whole file in its
        place.
        """
        known, name = self._known.get(version), name_of(stored).removesuffix(DELTA)
        if known is None or known.deltas.get(name) != stored:
            return False
        with contextlib.suppress(Missing, Corrupt):
            self._read_replaced(known.files[name])
            return True
        return False

    def _read_back(self, entry: Entry) -> None:
        n, number = entry.n, entry.version
        while number - 1 not in self._known and n > 0:
            n -= 1
            earlier = decode(self.store.get(entry_path(n)), n, self.store.get).entry
            if isinstance(earlier.body, VersionPublished) and earlier.body.number < number:
                self._known[number := earlier.body.number] = _KnownVersion.of(earlier.body)
                if not earlier.body.deltas:
                    return

    def _continues(self, number: int, name: str, kept: list[int]) -> bool:
        """Return whether the check of a later kept version also rebuilds this file of policy version `number`."""
        later = number + 1
        while (known := self._known.get(later)) and name in known.deltas:
            if later in kept:
                return True
            later += 1
        return False

    def _check_file(self, last: int, name: str, finite: bool) -> Iterator[tuple[int, Violation]]:
        """Rebuild the file `name` of policy version `last` and of all earlier versions down to the one that stores it
        whole."""
        first = last
        while (known := self._known.get(first)) and name in known.deltas:
            first -= 1
        number = first
        try:
            data = self._read_whole(first, name)
            for number in range(first + 1, last + 1):
                data = self._follow(number, name, data)
                if finite and not name.endswith(".json"):
                    _check_finite(self._known[number].files[name].path, data)
        except WrongDelta as wrong:
            yield number, wrong.violation

    def _read_whole(self, number: int, name: str) -> bytearray:
        known = self._known.get(number)
        if known is None or name not in known.files:
            where = self._known[number + 1].deltas[name].path
            raise WrongDelta(
                Violation("lineage", where, f"version {number} has no file {name} that a delta can change")
            )
        stored = known.files[name]
        try:
            return bytearray(self.store.get(stored.path))
        except (Missing, Corrupt) as error:
            raise WrongDelta(Violation("missing", stored.path, f"deltas of later versions need it: {error}")) from error

    def _follow(self, number: int, name: str, data: bytearray) -> bytearray:
        """Return the file of policy version `number`; `data` is the file of the version before, and may be changed."""
        file, delta = self._known[number].files[name], self._known[number].deltas[name]
        try:
            return self._apply(number, name, data)
        except Corrupt as error:
            found = error
        # the learner stores a whole file in place of a damaged delta
        with contextlib.suppress(Missing, Corrupt):
            return self._read_replaced(file)
        raise WrongDelta(Violation("altered", delta.path, f"version {number} cannot be rebuilt: {found}")) from found

    def _read_replaced(self, file: StoredObject) -> bytearray:
        whole = bytearray(self.store.get(file.path))
        check_object(file, len(whole), hashlib.sha256(whole).hexdigest())
        return whole

    def _apply(self, number: int, name: str, data: bytearray) -> bytearray:
        file, delta = self._known[number].files[name], self._known[number].deltas[name]
        parent, read = self._known[number - 1].files[name], fetch_delta(self.store, delta)
        try:
            named = read_delta(read)
        except ValueError as error:
            raise Corrupt(f"{delta.path} is not a delta: {error}") from error
        if (named.parent, named.result) != (parent.sha256, file.sha256):
            raise Corrupt(f"{delta.path} is not the difference from {parent.path} to {file.path}")
        apply_deltas([(delta, read)], memoryview(data))
        check_object(file, len(data), hashlib.sha256(data).hexdigest())
        return data


def _check_finite(path: str, data: bytearray) -> None:
    try:
        name = first_nonfinite(memoryview(data))
    except ValueError as error:
        what = f"the object is not a valid file of weights: {error}"
        raise WrongDelta(Violation("altered", path, what)) from error
    if name is not None:
        raise WrongDelta(Violation("lineage", path, f"tensor {name} has a NaN or an infinity"))
