"""A second fold over a log, for the audit: it names an entry that it cannot fold, and goes on.

`apply` is the rule. What it refuses is named. Then:

- An entry that names another hash than that of the entry before it, or a wrong head, is folded nevertheless.
- An entry with groups that are too old, or with tokens of versions that did not exist, is folded as if they were fresh.
- Any other refused entry is skipped, as every reader of the run would have done.
- After an entry that is lost (missing or damaged, and in no segment) there is no state to judge by. What follows is
  read, but not folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import BatchCommitted, Entry, VersionPublished, Written, decode, entry_path
from rollflow.storage.log.reading import Hole
from rollflow.storage.log.report import ViolationKind
from rollflow.storage.log.rules import apply, decide
from rollflow.storage.log.snapshots import healed
from rollflow.storage.log.state import Refused, RunState, TooOld
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import GroupKey

MOST = 5  # refused entries that are named from the first on that is passed over: it may be the cause of all others
REFUSALS = (
    Refused,
    KeyError,
    TypeError,
    ValueError,
    ArithmeticError,
)  # those but the first by what no role would write


@dataclass(slots=True)
class Refold:
    """A fold that is given the entries in order, from the one after `state` on."""

    store: ObjectStore
    state: RunState
    add: Callable[[ViolationKind, str, str], None]
    lost: bool = False  # an entry that the state depends on cannot be read
    sound: bool = True  # all that was read could be folded; what was damaged and is healed could
    _refused: list[int] = field(default_factory=list)  # the first entry that is passed over, and those behind it
    _broken: list[int] = field(default_factory=list)  # entries that name another one before them
    _unlinked: bool = False  # nothing is known of the hash that the next entry must name

    @property
    def missed(self) -> bool:
        """Whether an entry is lost or was passed over, so that the state is not the one that others were written by."""
        return self.lost or bool(self._refused)

    def over(self, found: Iterable[tuple[int, bytes | Hole | Corrupt]]) -> Iterator[tuple[Written, bytes, bool]]:
        """Entries that can be read, as parsed and as bytes, and whether they are to be believed.

        The first one that is passed over is not. Behind it a refusal says nothing: it may be what was missed.
        """
        for n, one in found:
            if isinstance(one, Hole):
                self.add("gap", entry_path(n), str(one))
                yield from self._heal(one)
                continue
            try:
                written = self._parse(n, one)
            except Corrupt as error:
                self.add("missing" if _wants(error) else "altered", entry_path(n), str(error))
                yield from self._heal(Hole(n, n + 1))
                continue
            yield written, one if isinstance(one, bytes) else b"", self._fold(written)

    def close(self) -> None:
        """Say what is known at the log's end only.

        A broken link is the fault of the entry before it, which is not what the next one followed; but of the entry
        itself if the one after it does not know it either, or there is none.
        """
        for n in self._broken:
            own = n + 1 in self._broken or n == self.state.n
            what = f"entry {n} follows another entry {n - 1} than the one that is there"
            self.add("altered", entry_path(n if own else n - 1), what if own else f"{what}: this one")
        if len(self._refused) > MOST:
            count, last = len(self._refused), self._refused[-1]
            self.add("lineage", entry_path(last), f"the last of {count} refused entries, of which {MOST} are named")

    def _parse(self, n: int, found: bytes | Corrupt) -> Written:
        if isinstance(found, Corrupt):
            raise found
        return decode(found, n, self.store.get)

    def _heal(self, hole: Hole) -> Iterator[tuple[Written, bytes, bool]]:
        found = healed(self.store, hole.first, hole.end)
        if found is None:
            self._lose(hole)
            return
        for n, data in zip(range(hole.first, hole.end), found, strict=True):
            try:
                written = decode(data, n, self.store.get)
            except Corrupt:  # its index is gone
                self._lose(Hole(n, n + 1))
                continue
            yield written, data, self._fold(written)

    def _lose(self, hole: Hole) -> None:
        self.state = replace(self.state, n=hole.end - 1)
        self.lost, self.sound, self._unlinked = True, False, True

    def _fold(self, written: Written) -> bool:
        """Fold an entry, if it can be; returns whether it is to be believed."""
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
        """The state after an entry that was refused for what can be overlooked; None: it is passed over."""
        state, where = self.state, entry_path(entry.n)
        try:
            after = decide(state, entry.n, entry.role, entry.claim, entry.body)
        except REFUSALS as error:
            kind, what = _kind(state, entry, error), f"it cannot stand where it stands: {error}"
            fresh = _as_if_fresh(state, entry) if kind == "stale" else None
            if fresh is None or self._refused:
                self._refused.append(entry.n)
            if len(self._refused) <= MOST:
                self.add(kind, where, what)
            return fresh
        told = (entry.version, entry.batch)
        if told != (after.version, after.next_batch) and not self._refused:
            what = f"it says version and batch {told}, and means {(after.version, after.next_batch)}"
            self.add("lineage", where, what)
        return after


def _wants(error: Corrupt) -> bool:
    """Whether an entry cannot be read because its index object is not there."""
    return isinstance(error.__cause__, ValueError) and isinstance(error.__cause__.__cause__, Missing)


def _as_if_fresh(state: RunState, entry: Entry) -> RunState | None:
    """The state after a commit whose groups are too old, or too new, if nothing else is wrong with it."""
    lifted = state.copy()
    lifted.alpha = math.inf
    assert isinstance(entry.body, BatchCommitted)
    groups = tuple(group._replace(started=state.version, newest=state.version) for group in entry.body.groups)
    try:
        after = decide(lifted, entry.n, entry.role, entry.claim, replace(entry.body, groups=groups))
    except Refused:
        return None
    after.alpha = state.alpha
    return after


def _kind(state: RunState, entry: Entry, error: Exception) -> ViolationKind:
    """The kind of violation that a refused entry counts as."""
    if isinstance(error, TooOld):
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
            return "missing"  # one that was skipped
        upcoming[prompt % len(upcoming)] += len(upcoming)
    there = all(0 <= group.started <= group.newest <= state.version for group in body.groups)
    return "lineage" if there else "stale"


def _had_its_fate(state: RunState, key: GroupKey) -> bool:
    return state.cursor.covers(key.prompt) and key.attempt < state.open.get(key.prompt, key.attempt + 1)
