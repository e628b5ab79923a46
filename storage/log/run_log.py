"""A run's log: one sequence of numbered entries, each created atomically, and nothing else that decides.

    append   state --decide--> entry n + 1 --create--> it is there, and so is all that it names
                ^                       |
                +--fold-- read n + 1 <--+ Conflict: somebody else's, or ours by an earlier try

- Whoever appends entry n has read all entries before it: a writer goes past number n only after *reading* entry n. That
  a number is free proves nothing about the numbers below it.
- An append has one id, through all its tries and numbers. Its data object is written once; only the entry is tried
  again.
- A reader folds what it reads. An entry that is refused, damaged or missing in the middle stops it with an error that
  names the entry: nobody appends behind a hole. A damaged entry is read from its segment if the next entry's hash fits.
- An append does not look first: a writer that is behind learns it from the conflict.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from rollflow.storage.errors import Conflict, Corrupt, Missing, Unreachable
from rollflow.storage.log.entries import (
    FOLDER,
    Body,
    Claimed,
    Encoded,
    Entry,
    Role,
    RunCreated,
    Written,
    decode,
    encode,
    entry_number,
    entry_path,
)
from rollflow.storage.log.rules import apply, decide, deposed, with_file
from rollflow.storage.log.snapshots import (
    healed,
    is_due,
    keep_segments,
    keep_snapshot,
    newest_snapshot,
)
from rollflow.storage.log.state import Refused, RunState
from rollflow.storage.objects.base import Data, ObjectStore, pieces
from rollflow.storage.records import StoredObject

TRIES = 1_000  # races that one append may lose to others' entries: a bound, not a schedule
UNANSWERED = 20  # tries while the store answers reads and no writes; each has taken the store's own patience
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0  # seconds before an append that no entry answers is tried again
READERS = 16  # entries that are read at a time, where each is a request
WINDOW = 1_024  # the most entries that are held when no snapshot of a long log can be read
AHEAD = 256  # numbers behind a free one that are looked at, in a store that cannot list from a name on

Decide = Callable[[RunState, StoredObject | None], Body]


def creation(run: ObjectStore) -> Entry:
    """Entry 0 of a run; its body is `RunCreated`.

    Raises:
        Missing: there is no run.
        Corrupt: it cannot be read.
    """
    return decode(run.get(entry_path(0)), 0, run.get).entry


class Log:
    """One process's view of a run's log. Safe to use from threads; `state` is a value that nobody changes."""

    def __init__(self, store: ObjectStore) -> None:
        """From the newest snapshot and what follows it.

        Raises:
            Corrupt: an entry is missing, damaged or refused.
        """
        self.store = store
        self._lock = threading.RLock()
        self._keeping: list[threading.Thread] = []
        self._state = newest_snapshot(store)
        self._ahead: dict[int, bytes] = {}
        self._drafts: dict[str, _Draft] = {}  # appends under way, by id
        due, listed = None, self._listed()
        for start in range(0, len(listed), WINDOW):
            self._read_ahead(listed[start : start + WINDOW])
            due = self._follow(max(self._ahead))[1] or due
        due = self._follow()[1] or due
        while self._goes_on():
            due = self._follow()[1] or due
        self._keep(due)

    @property
    def state(self) -> RunState:
        """What the log says, as far as it was read."""
        return self._state

    def follow(self) -> list[Written]:
        """Read what is new; returns it.

        Raises:
            Corrupt: as the constructor.
        """
        return self._follow()[0]

    def read(self, n: int) -> Written | None:
        """Entry `n`, which may be an old one; None if there is none.

        Raises:
            Corrupt: it is damaged, and cannot be read from its segment either.
        """
        path = entry_path(n)
        try:
            return self._decoded(self._ahead.pop(n) if n in self._ahead else self.store.get(path), n)
        except Missing:
            return None if n > self._state.n else self._healed(n, f"{path} is missing")
        except Corrupt as error:
            return self._healed(n, str(error))

    def create(self, body: RunCreated) -> None:
        """Append entry 0; `Conflict` if the run exists."""
        self._append("creator", 0, lambda state, stored: body)

    def claim(self, role: Role, under: int | None = None, **who: object) -> Writer:
        """Take a role from whoever had it.

        Args:
            under: the supervisor's claim it is taken under; without one, that of the newest on the same cluster.
            who: what `Claimed` says of it: `who`, `cluster`, `host`, `process`.

        Raises:
            Deposed: the run has another supervisor now.
        """

        def claimed(state: RunState, stored: StoredObject | None) -> Body:
            newest = None if role == "supervisor" else state.newest_claim("supervisor")
            return Claimed(under=newest if under is None else under, **who)  # type: ignore[arg-type]  # its fields

        return Writer(self, role, self._append(role, None, claimed).n)

    def settle(self) -> None:
        """Wait until snapshots and segments are written."""
        for thread in self._keeping:
            thread.join()

    # --- appending ----------------------------------------------------------------------------------------------

    def _append(self, role: Role, claim: int | None, body: Decide, attached: Attached | None = None) -> Entry:
        """See `Writer.append`. Without a `claim` the entry claims for itself."""
        draft = _Draft(role, claim, body, attached)
        self._drafts[draft.id] = draft
        try:
            return self._append_draft(draft)
        finally:
            del self._drafts[draft.id]

    def _append_draft(self, draft: _Draft) -> Entry:
        unanswered, due = 0, None
        for tried in range(TRIES):
            with self._lock:
                if draft.folded is not None:  # it came after all, and another thread has read it
                    return draft.folded.entry
                n = self._state.n + 1
                written, lost = self._tried(draft, n)
                if written is not None and written is draft.written:
                    self._state = replace(draft.after, sha256=written.sha256)  # as it was decided
                elif written is not None:
                    self._fold(written)
                due = self._state if written is not None and is_due(n) else None
            unanswered += isinstance(lost, Unreachable)
            if written is None and unanswered >= UNANSWERED:
                raise lost
            if written is None:
                time.sleep(random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tried, 10)))
            elif written.entry.id == draft.id:
                self._keep(due)
                return written.entry
        raise Unreachable(f"{self.store.uri}: an entry could not be appended in {TRIES} tries: {lost}") from lost

    def _tried(self, draft: _Draft, n: int) -> tuple[Written | None, Exception]:
        """The entry that has number `n` after one try, if one has; else why this one has not."""
        try:
            return self._write(draft, n), Exception()
        except (Conflict, Unreachable) as error:
            found = self.read(n)
            if found is None and isinstance(error, Refused):
                raise  # not for want of news
            if isinstance(error, Unreachable) and self._is_near and found and found.entry.id == draft.id:
                with contextlib.suppress(Conflict):  # which says that its name is synced now
                    self._write(draft, n)
            return found, error

    def _write(self, draft: _Draft, n: int) -> Written:
        """Create entry `n`, after all that it names."""
        attached = draft.attached
        if attached is None or draft.stored is not None:
            entry, encoded = self._encoded(self._proposed(draft, n, draft.stored))
            self.store.create(entry_path(n), encoded.data)
        else:
            entry, encoded = self._write_both(draft, n, attached)
        draft.written = Written(entry, encoded.sha256)
        return draft.written

    def _write_both(self, draft: _Draft, n: int, attached: Attached) -> tuple[Entry, Encoded]:
        """Write what is attached, and entry `n` that names it. What is refused is not written."""
        unhashed = self._proposed(draft, n, StoredObject(attached.path, attached.size, ""))
        made: list[tuple[StoredObject, Entry, Encoded]] = []

        def content(sha256: str) -> bytes:
            stored = StoredObject(attached.path, attached.size, sha256)
            draft.after, body = with_file(draft.after, unhashed.body, stored)
            made[:] = [(stored, *self._encoded(replace(unhashed, at=time.time(), body=body)))]
            return made[0][2].data

        try:
            self.store.create_naming(entry_path(n), content, attached.path, attached.data)
        except (Conflict, Unreachable) as error:
            if made and (isinstance(error, Conflict) or not self._is_near):  # a disk that failed may not have it yet
                draft.stored = made[0][0]
            raise
        return made[0][1:]

    def _encoded(self, entry: Entry) -> tuple[Entry, Encoded]:
        """An entry and its bytes; its index object is there."""
        encoded = encode(entry)
        if encoded.index is not None:
            self.store.put(encoded.index.path, encoded.index_data)
        return entry, encoded

    def _proposed(self, draft: _Draft, n: int, stored: StoredObject | None) -> Entry:
        """Entry `n` as the append would have it, once the fold agrees."""
        body = draft.body(self._state, stored)
        claim = n if draft.claim is None else draft.claim
        draft.after = decide(self._state, n, draft.role, claim, body)
        head = (draft.after.version, draft.after.next_batch)
        return Entry(n, self._state.sha256, draft.id, draft.role, claim, *head, time.time(), body)

    # --- reading ------------------------------------------------------------------------------------------------

    def _decoded(self, data: bytes, n: int) -> Written:
        return decode(data, n, self.store.get)

    def _follow(self, last: float = math.inf) -> tuple[list[Written], RunState | None]:
        """Read what is new up to entry `last`; returns it, and the newest state for which a snapshot is due."""
        found, due = [], None
        with self._lock:
            while self._state.n < last and (written := self.read(self._state.n + 1)) is not None:
                self._fold(written)
                found.append(written)
                due = self._state if is_due(self._state.n) else due
        return found, due

    def _fold(self, written: Written) -> None:
        try:
            self._state = apply(self._state, written)
            if (draft := self._drafts.get(written.entry.id)) is not None:
                draft.folded = written
        except Refused as error:
            raise Corrupt(f"{entry_path(written.entry.n)} cannot stand where it stands: {error}") from error

    def _healed(self, n: int, why: str) -> Written:
        """Entry `n` from its segment, if the entry after it says that it is the one."""
        found = healed(self.store, n, n + 1)
        if found is None:
            raise Corrupt(f"{why}; no segment has it: `rollflow repair` says what can be done")
        return self._decoded(found[0], n)

    def _listed(self) -> list[int]:
        """The entries that follow the snapshot, where each read is a request."""
        if self._is_near:
            return []
        paths = self.store.list(FOLDER, after=entry_path(self._state.n) if self._state.n >= 0 else "")
        return [n for path in paths if (n := entry_number(path)) is not None]

    def _read_ahead(self, numbers: Sequence[int]) -> None:
        """Get these entries, several at a time."""
        with ThreadPoolExecutor(READERS) as readers:
            self._ahead |= zip(numbers, readers.map(self.store.get, map(entry_path, numbers)), strict=True)

    def _goes_on(self) -> bool:
        """Whether there is an entry behind the end. Then the one in between was written a moment ago, or is lost."""
        n = self._state.n + 1
        if self._is_near:  # to list a folder of a long run takes longer than some probes
            beyond = next((m for m in range(n + 1, n + AHEAD) if self.store.exists(entry_path(m))), -1)
        else:
            beyond = min((m for m in self._ahead if m > n), default=-1)
        if beyond <= n:
            return False
        self._fold(self.read(n) or self._healed(n, f"{entry_path(n)} is missing, {entry_path(beyond)} is there"))
        return True

    @property
    def _is_near(self) -> bool:
        return self.store.local_path(FOLDER) is not None

    def _keep(self, state: RunState | None) -> None:
        """Take the snapshot that is due, in the background."""
        if state is None:
            return
        self._keeping = [thread for thread in self._keeping if thread.is_alive()]
        thread = threading.Thread(target=self._seal, args=(state,), name="snapshot", daemon=True)
        self._keeping.append(thread)
        thread.start()

    def _seal(self, state: RunState) -> None:
        keep_segments(self.store, state.n)
        keep_snapshot(self.store, state)


@dataclass(slots=True)
class Attached:
    """A data object that an entry is to name, at a path that was never used before."""

    path: str
    data: Sequence[memoryview]
    size: int = field(init=False)  # bytes

    def __init__(self, path: str, data: Data) -> None:
        self.path, self.data = path, pieces(data)
        self.size = sum(map(len, self.data))


@dataclass(slots=True)
class _Draft:
    """One append, through all its tries."""

    role: Role
    claim: int | None
    body: Decide
    attached: Attached | None
    stored: StoredObject | None = None  # what was attached, once it is durable
    after: RunState = field(default_factory=RunState)  # the state that it was last decided to make
    written: Written | None = None  # it, once it is created
    folded: Written | None = None  # it, as it was read
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Writer:
    """A role that was claimed. Once another claims it, every append ends with `Deposed`, and so does `check`."""

    log: Log
    role: Role
    claim: int

    def append(self, body: Decide, attached: Attached | None = None) -> Entry:
        """Append the entry that `body` makes from the state and from what was `attached`; it is called again after each
        lost race.

        Raises:
            Deposed: the role has another claim.
            Refused: the state does not allow it; so may `body` itself raise.
            StoreFailed, Unreachable: nothing was committed, or it is not known: read the log again.
        """
        return self.log._append(self.role, self.claim, body, attached)

    def valid(self) -> bool:
        """Whether nobody has claimed the role since, as far as the log was read."""
        return self.log.state.newest_claim(self.role) == self.claim

    def check(self) -> None:
        """Read what is new; raise `Deposed` if somebody has claimed the role since."""
        self.log.follow()
        if not self.valid():
            raise deposed(self.log.state, self.role)
