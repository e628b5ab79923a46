"""Defines a run's log: a sequence of numbered entries, each of which is created atomically. If other records of the run
disagree with the log, the log is right.

    append   state --decide--> entry n + 1 --create--> stored, and so are all objects that it names
                ^                       |
                +--fold-- read n + 1 <--+ Conflict: entry n + 1 exists, by another writer or by our earlier try

- The writer of entry n has read all entries before it: a writer tries number n + 1 only after *reading* entry n. A free
  number does not prove that every lower number has an entry.
- All tries of one append use the same id. The data object of an append is written once, and only the entry is retried.
- A reader applies every entry that it reads to the run's state. A refused, damaged or missing entry stops the reader
  with an error that names the entry, so no process appends after a gap. A damaged entry is read from its copy in a
  segment, if the next entry names the hash of this copy.
- An append does not read the log first: if other entries came first, `create` fails with a conflict.
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
    EncodedEntry,
    Entry,
    Role,
    RunCreated,
    WrittenEntry,
    decode,
    encode,
    entry_number,
    entry_path,
    open_sealed,
)
from rollflow.storage.log.rules import apply, build_deposed, decide, with_file
from rollflow.storage.log.snapshots import (
    is_due,
    keep_segments,
    keep_snapshot,
    newest_snapshot,
    restore_segment,
)
from rollflow.storage.log.state import EntryRefused, RunState
from rollflow.storage.objects.base import Data, ObjectStore, split_buffers
from rollflow.storage.records import StoredObject

TRIES = 1_000  # largest number of tries of one append to the log; most tries fail because another process appends first
# largest number of unanswered writes of one append to the log; each write is itself retried by the store
UNANSWERED = 20
# first and longest pause, in seconds, before an append to the log is retried, unless another process was faster
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0
READERS = 16  # number of log entries that are read in parallel from a remote store
WINDOW = 1_024  # largest number of log entries in memory if a long log has no readable snapshot
AHEAD = 256  # in a local store, where listing is slow, this many numbers after a missing log entry are looked up

Decide = Callable[[RunState, StoredObject | None], Body]


def read_creation(run: ObjectStore) -> Entry:
    """Read log entry 0 of a run, whose body is `RunCreated`.

    Raises:
        Missing: the store contains no run.
        Corrupt: log entry 0 cannot be read.
    """
    return decode(run.get(entry_path(0)), 0, run.get).entry


def read_origin(run: ObjectStore) -> tuple[int, str] | None:
    """Read a run's format number and the release that created the run; return None if log entry 0 cannot be read.

    Only the format number and the release are parsed, so the function can also read runs of other releases.
    """
    try:
        body = open_sealed(run.get(entry_path(0)))["body"]
        return int(body["format"]), str(body.get("code_version", ""))
    except (Missing, ValueError, KeyError, TypeError, AttributeError):
        return None


class Log:
    """The log of a run, as one process has read it so far. Threads may share a `Log`: `state` is never changed in
    place."""

    def __init__(self, store: ObjectStore) -> None:
        """Open the log: load the newest snapshot, and apply the log entries after the snapshot.

        Raises:
            Corrupt: a log entry is missing or damaged, or violates the log's rules.
        """
        self.store = store
        self._lock = threading.RLock()
        self._keeping: list[threading.Thread] = []
        self._state = newest_snapshot(store)
        self._ahead: dict[int, bytes] = {}
        self._drafts: dict[str, _Draft] = {}  # appends in progress, by id
        due, listed = None, self._list_entries()
        for start in range(0, len(listed), WINDOW):
            self._read_ahead(listed[start : start + WINDOW])
            due = self._follow(max(self._ahead))[1] or due
        due = self._follow()[1] or due
        while self._goes_on():
            due = self._follow()[1] or due
        self._keep(due)

    @property
    def state(self) -> RunState:
        """The run's state after the newest log entry that was read."""
        return self._state

    def follow(self) -> list[WrittenEntry]:
        """Read the new log entries, update the run's state, and return the entries.

        Raises:
            Corrupt: a log entry is missing or damaged, or violates the log's rules.
        """
        return self._follow()[0]

    def read(self, n: int) -> WrittenEntry | None:
        """Read log entry `n`, which need not be the newest entry; return None if the log entry does not exist.

        Raises:
            Corrupt: the log entry is damaged or was lost, and no segment has an intact copy of the entry.
        """
        path = entry_path(n)
        try:
            return self._decode_entry(self._ahead.pop(n) if n in self._ahead else self.store.get(path), n)
        except Missing:
            return None if n > self._state.n else self._restore_entry(n, f"{path} is missing from the log")
        except Corrupt as error:
            return self._restore_entry(n, str(error))

    def create(self, body: RunCreated) -> None:
        """Create the run by appending log entry 0; raise `Conflict` if the run exists."""
        self._append("creator", 0, lambda state, stored: body)

    def claim(self, role: Role, under: int | None = None, **who: object) -> Writer:
        """Claim a role for this process; the process that had the role before can append no more log entries.

        Args:
            under: the log entry by which this process's supervisor claimed its role; by default the newest such entry.
            who: fields of `Claimed`: `who`, `cluster`, `host`, `process`.

        Raises:
            Deposed: another process has become the run's supervisor.
        """

        def claimed(state: RunState, stored: StoredObject | None) -> Body:
            newest = None if role == "supervisor" else state.newest_claim("supervisor")
            return Claimed(under=newest if under is None else under, **who)  # type: ignore[arg-type]  # fields of `Claimed`

        return Writer(self, role, self._append(role, None, claimed).n)

    def settle(self) -> None:
        """Wait until the background thread has written all pending snapshots and segments."""
        for thread in self._keeping:
            thread.join()

    # --- appending ----------------------------------------------------------------------------------------------

    def _append(self, role: Role, claim: int | None, body: Decide, attached: AttachedObject | None = None) -> Entry:
        """Append a log entry, as `Writer.append` describes. If `claim` is None, the log entry claims the role."""
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
                if draft.folded is not None:  # the log entry was written after all, and another thread has read it
                    return draft.folded.entry
                n = self._state.n + 1
                written, lost = self._try_write(draft, n)
                if written is not None and written is draft.written:
                    self._state = replace(draft.after, sha256=written.sha256)  # `decide` has already applied the entry
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
        raise Unreachable(f"no log entry could be appended to {self.store.uri} in {TRIES} tries: {lost}") from lost

    def _try_write(self, draft: _Draft, n: int) -> tuple[WrittenEntry | None, Exception]:
        """Try once to write log entry `n`; return the log entry that now has the number `n`, if any, and the error."""
        try:
            return self._write(draft, n), Exception()
        except (Conflict, Unreachable) as error:
            found = self.read(n)
            if found is None and isinstance(error, EntryRefused):
                raise  # the run's state is current, so reading the log again cannot help
            if isinstance(error, Unreachable) and self._is_near and found and found.entry.id == draft.id:
                with contextlib.suppress(Conflict):  # a conflict means that the store has synced the entry's file name
                    self._write(draft, n)
            return found, error

    def _write(self, draft: _Draft, n: int) -> WrittenEntry:
        """Write the objects that log entry `n` names, then create the log entry."""
        attached = draft.attached
        if attached is None or draft.stored is not None:
            entry, encoded = self._encode_entry(self._propose_entry(draft, n, draft.stored))
            self.store.create(entry_path(n), encoded.data)
        else:
            entry, encoded = self._write_both(draft, n, attached)
        draft.written = WrittenEntry(entry, encoded.sha256)
        return draft.written

    def _write_both(self, draft: _Draft, n: int, attached: AttachedObject) -> tuple[Entry, EncodedEntry]:
        """Write the attached data object, then log entry `n`, which names the object. If the log's rules refuse the log
        entry, nothing is written.
        """
        unhashed = self._propose_entry(draft, n, StoredObject(attached.path, attached.size, ""))
        made: list[tuple[StoredObject, Entry, EncodedEntry]] = []

        def content(sha256: str) -> bytes:
            stored = StoredObject(attached.path, attached.size, sha256)
            draft.after, body = with_file(draft.after, unhashed.body, stored)
            made[:] = [(stored, *self._encode_entry(replace(unhashed, at=time.time(), body=body)))]
            return made[0][2].data

        try:
            self.store.create_naming(entry_path(n), content, attached.path, attached.data)
        except (Conflict, Unreachable) as error:
            # after a failed write, the data may not be durable in a local store
            if made and (isinstance(error, Conflict) or not self._is_near):
                draft.stored = made[0][0]
            raise
        return made[0][1:]

    def _encode_entry(self, entry: Entry) -> tuple[Entry, EncodedEntry]:
        """Encode a log entry, and store the entry's index object if there is one."""
        encoded = encode(entry)
        if encoded.index is not None:
            self.store.put(encoded.index.path, encoded.index_data)
        return entry, encoded

    def _propose_entry(self, draft: _Draft, n: int, stored: StoredObject | None) -> Entry:
        """Build log entry `n`; raise `EntryRefused` if the log's rules do not allow the entry."""
        body = draft.body(self._state, stored)
        claim = n if draft.claim is None else draft.claim
        draft.after = decide(self._state, n, draft.role, claim, body)
        head = (draft.after.version, draft.after.next_batch)
        return Entry(n, self._state.sha256, draft.id, draft.role, claim, *head, time.time(), body)

    # --- reading ------------------------------------------------------------------------------------------------

    def _decode_entry(self, data: bytes, n: int) -> WrittenEntry:
        return decode(data, n, self.store.get)

    def _follow(self, last: float = math.inf) -> tuple[list[WrittenEntry], RunState | None]:
        """Read the new log entries up to `last`; return the entries, and the newest state that needs a snapshot."""
        found, due = [], None
        with self._lock:
            while self._state.n < last and (written := self.read(self._state.n + 1)) is not None:
                self._fold(written)
                found.append(written)
                due = self._state if is_due(self._state.n) else due
        return found, due

    def _fold(self, written: WrittenEntry) -> None:
        try:
            self._state = apply(self._state, written)
            if (draft := self._drafts.get(written.entry.id)) is not None:
                draft.folded = written
        except EntryRefused as error:
            raise Corrupt(f"log entry {entry_path(written.entry.n)} is refused by the log's rules: {error}") from error

    def _restore_entry(self, n: int, why: str) -> WrittenEntry:
        """Read log entry `n` from its copy in a segment; raise `Corrupt` if log entry `n + 1` names another hash."""
        found = restore_segment(self.store, n, n + 1)
        if found is None:
            raise Corrupt(
                f"{why}; no log segment contains a copy of this entry, so run `rollflow audit --repair`, which "
                "lists the possible repairs"
            )
        return self._decode_entry(found[0], n)

    def _list_entries(self) -> list[int]:
        """List the numbers of the log entries to read in advance; return an empty list for a local store."""
        if self._is_near:
            return []
        paths = self.store.list(FOLDER, after=entry_path(self._state.n) if self._state.n >= 0 else "")
        return [n for path in paths if (n := entry_number(path)) is not None]

    def _read_ahead(self, numbers: Sequence[int]) -> None:
        """Read the log entries with the given numbers in advance, several entries at a time."""
        with ThreadPoolExecutor(READERS) as readers:
            self._ahead |= zip(numbers, readers.map(self.store.get, map(entry_path, numbers)), strict=True)

    def _goes_on(self) -> bool:
        """Apply the next log entry if a later log entry exists; return whether an entry was applied.

        The next log entry was written after the last read, or it was lost and is restored from a segment.
        """
        n = self._state.n + 1
        if self._is_near:  # looking up some names is faster than listing the folder of a long run
            beyond = next((m for m in range(n + 1, n + AHEAD) if self.store.exists(entry_path(m))), -1)
        else:
            beyond = min((m for m in self._ahead if m > n), default=-1)
        if beyond <= n:
            return False
        self._fold(
            self.read(n) or self._restore_entry(n, f"{entry_path(n)} is missing, but {entry_path(beyond)} exists")
        )
        return True

    @property
    def _is_near(self) -> bool:
        return self.store.local_path(FOLDER) is not None

    def _keep(self, state: RunState | None) -> None:
        """Write a snapshot of the run's state `state` in the background, unless `state` is None."""
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
class AttachedObject:
    """A data object that is stored together with a log entry that names it, at a path that was never used."""

    path: str
    data: Sequence[memoryview]
    size: int = field(init=False)  # bytes

    def __init__(self, path: str, data: Data) -> None:
        self.path, self.data = path, split_buffers(data)
        self.size = sum(map(len, self.data))


@dataclass(slots=True)
class _Draft:
    """The progress of one append to the log, over all tries of the append."""

    role: Role
    claim: int | None
    body: Decide
    attached: AttachedObject | None
    stored: StoredObject | None = None  # the attached data object, as soon as it is stored durably
    after: RunState = field(default_factory=RunState)  # the run's state after this log entry, computed by the last try
    written: WrittenEntry | None = None  # the log entry of the last completed write
    folded: WrittenEntry | None = None  # the appended log entry, if it was read from the log
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Writer:
    """Appends log entries for a role's process. If another process claims the role, its methods raise `Deposed`."""

    log: Log
    role: Role
    claim: int

    def append(self, body: Decide, attached: AttachedObject | None = None) -> Entry:
        """Append a log entry, which the function `body` builds for each try from the run's state and the attachment.

        Raises:
            Deposed: another process has claimed the role.
            EntryRefused: the log's rules do not allow the log entry, or `body` raised this error.
            StoreFailed: the store refuses writes, and nothing was committed.
            Unreachable: it is unknown whether the log entry was committed, so the log must be read again.
        """
        return self.log._append(self.role, self.claim, body, attached)

    def valid(self) -> bool:
        """Return whether this process still has its role, according to the log entries read so far."""
        return self.log.state.newest_claim(self.role) == self.claim

    def check(self) -> None:
        """Read the new log entries; raise `Deposed` if another process has claimed the role."""
        self.log.follow()
        if not self.valid():
            raise build_deposed(self.log.state, self.role)
