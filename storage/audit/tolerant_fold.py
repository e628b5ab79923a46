"""Computes a run's state from the log for an audit. Log entries that violate the log's rules are reported, and the
audit continues.

An entry with a minor fault, such as a wrong hash of the previous entry or groups that are too old, is still applied. An
entry with any other fault is skipped. After a lost entry the run's state is unknown, so later entries are read but not
applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rollflow.storage.audit.report import ViolationKind
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import BatchCommitted, Entry, VersionPublished, WrittenEntry, decode, entry_path
from rollflow.storage.log.reading import LogGap
from rollflow.storage.log.rules import apply, decide
from rollflow.storage.log.snapshots import restore_segment
from rollflow.storage.log.state import EntryRefused, GroupTooOld, RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import GroupKey

MOST = 5  # largest number of invalid log entries that are reported, because the first may have caused the others
REFUSALS = (
    EntryRefused,
    KeyError,
    TypeError,
    ValueError,
    ArithmeticError,
)  # errors other than `EntryRefused` come from log entries that rollflow never writes


@dataclass(slots=True)
class TolerantFold:
    """Applies the log entries after `state` to the state, in order, and reports each entry that violates the log's
    rules."""

    store: ObjectStore
    state: RunState
    add: Callable[[ViolationKind, str, str], None]
    lost: bool = False  # true: a log entry on which the run's state depends cannot be read
    sound: bool = True  # true: every log entry so far could be applied, if necessary from its copy
    _refused: list[int] = field(default_factory=list)  # the first skipped log entry, and the invalid entries after it
    _broken: list[int] = field(default_factory=list)  # log entries that name a wrong hash of the previous entry
    _unlinked: bool = False  # true: the hash that the next log entry must name is unknown

    @property
    def missed(self) -> bool:
        """True if a log entry was lost or skipped, so that the run's state in the audit differs from the state in the
        run's own processes.
        """
        return self.lost or bool(self._refused)

    def over(self, found: Iterable[tuple[int, bytes | LogGap | Corrupt]]) -> Iterator[tuple[WrittenEntry, bytes, bool]]:
        """Apply log entries to the run's state; yield each readable log entry, its bytes, and whether the entry is
        trusted.

        The first skipped log entry is not trusted. Later log entries that violate the rules are trusted, because the
        skipped entry may be the cause of the violation.
        """
        for n, item in found:
            if isinstance(item, LogGap):
                self.add("gap", entry_path(n), str(item))
                yield from self._heal(item)
                continue
            try:
                written = self._parse(n, item)
            except Corrupt as error:
                self.add("missing" if _wants(error) else "altered", entry_path(n), str(error))
                yield from self._heal(LogGap(n, n + 1))
                continue
            yield written, item if isinstance(item, bytes) else b"", self._fold(written)

    def close(self) -> None:
        """Report what is known only at the log's end: log entries that name a wrong hash, and the number of invalid log
        entries.

        If a log entry names a wrong hash of the previous entry, the previous entry is reported as altered. If two
        successive log entries name a wrong hash, or if the last log entry names a wrong hash, the first entry that
        names a wrong hash is itself reported as altered.
        """
        for n in self._broken:
            own = n + 1 in self._broken or n == self.state.n
            what = f"entry {n} names another hash of entry {n - 1} than that entry has"
            self.add(
                "altered",
                entry_path(n if own else n - 1),
                what if own else f"entry {n} names another hash for this entry",
            )
        if len(self._refused) > MOST:
            count, last = len(self._refused), self._refused[-1]
            self.add(
                "lineage",
                entry_path(last),
                f"{count} entries are refused, of which {MOST} are listed; this entry is the last of them",
            )

    def _parse(self, n: int, found: bytes | Corrupt) -> WrittenEntry:
        if isinstance(found, Corrupt):
            raise found
        return decode(found, n, self.store.get)

    def _heal(self, hole: LogGap) -> Iterator[tuple[WrittenEntry, bytes, bool]]:
        found = restore_segment(self.store, hole.first, hole.end)
        if found is None:
            self._lose(hole)
            return
        for n, data in zip(range(hole.first, hole.end), found, strict=True):
            try:
                written = decode(data, n, self.store.get)
            except Corrupt:  # the index object of the log entry is missing or altered
                self._lose(LogGap(n, n + 1))
                continue
            yield written, data, self._fold(written)

    def _lose(self, hole: LogGap) -> None:
        self.state = replace(self.state, n=hole.end - 1)
        self.lost, self.sound, self._unlinked = True, False, True

    def _fold(self, written: WrittenEntry) -> bool:
        """Apply a log entry to the run's state if possible; return whether the log entry is trusted."""
        entry = written.entry
        if self._unlinked:
            self.state, self._unlinked = replace(self.state, sha256=entry.prev), False
        if not self.lost:
            try:
                self.state = apply(self.state, written)
                return True
            except REFUSALS:
                self.sound = False
        if entry.prev != self.state.sha256:
            self._broken.append(entry.n)
        missed = bool(self._refused)
        after = self.state if self.lost else self._folded_nevertheless(entry)
        self.state = replace(after or self.state, n=entry.n, sha256=written.sha256)
        return after is not None or missed

    def _folded_nevertheless(self, entry: Entry) -> RunState | None:
        """Return the run's state after an invalid log entry whose fault can be ignored; return None if the log entry is
        skipped."""
        state, where = self.state, entry_path(entry.n)
        try:
            after = decide(state, entry.n, entry.role, entry.claim, entry.body)
        except REFUSALS as error:
            kind, what = _kind(state, entry, error), f"the entry is refused by the log's rules: {error}"
            fresh = _as_if_fresh(state, entry) if kind == "stale" else None
            if fresh is None or self._refused:
                self._refused.append(entry.n)
            if len(self._refused) <= MOST:
                self.add(kind, where, what)
            return fresh
        head, expected = (entry.version, entry.batch), (after.version, after.next_batch)
        if head != expected and not self._refused:
            what = f"the entry names (version, next batch) = {head}, but {expected} follows from the log"
            self.add("lineage", where, what)
        return after


def _wants(error: Corrupt) -> bool:
    """Return whether a log entry cannot be read because the entry's index object, which contains its long lists, is
    missing."""
    return isinstance(error.__cause__, ValueError) and isinstance(error.__cause__.__cause__, Missing)


def _as_if_fresh(state: RunState, entry: Entry) -> RunState | None:
    """Return the run's state after a batch's commit as if no group were too old; return None if the commit has another
    fault."""
    lifted = state.copy()
    lifted.alpha = math.inf
    assert isinstance(entry.body, BatchCommitted)
    groups = tuple(group._replace(started=state.version, newest=state.version) for group in entry.body.groups)
    try:
        after = decide(lifted, entry.n, entry.role, entry.claim, replace(entry.body, groups=groups))
    except EntryRefused:
        return None
    after.alpha = state.alpha
    return after


def _kind(state: RunState, entry: Entry, error: Exception) -> ViolationKind:
    """Return the kind of violation that an invalid log entry is reported as."""
    if isinstance(error, GroupTooOld):
        return "stale"
    match entry.body:
        case BatchCommitted(number) if number > state.next_batch:
            return "gap"
        case BatchCommitted(number) if number < state.next_batch and number not in state.holes:
            return "duplicate"
        case BatchCommitted():
            return _kind_of_commit(state, entry.body)
        case VersionPublished(number) if number > state.version + 1:
            return "gap"
        case VersionPublished(weights=()):
            return "missing"
    return "lineage"


def _kind_of_commit(state: RunState, body: BatchCommitted) -> ViolationKind:
    keys = [*(discard.key for discard in body.discards), *(group.key for group in body.groups)]
    again = [prompt for prompt in body.issued if state.cursor.covers(prompt)]
    if again or len(set(keys)) < len(keys) or any(_had_its_fate(state, key) for key in keys):
        return "duplicate"
    upcoming = list(state.cursor.upcoming)
    for prompt in body.issued:
        if prompt != upcoming[prompt % len(upcoming)]:
            return "missing"  # a prompt was skipped
        upcoming[prompt % len(upcoming)] += len(upcoming)
    there = all(0 <= group.started <= group.newest <= state.version for group in body.groups)
    return "lineage" if there else "stale"


def _had_its_fate(state: RunState, key: GroupKey) -> bool:
    return state.cursor.covers(key.prompt) and key.attempt < state.open.get(key.prompt, key.attempt + 1)
