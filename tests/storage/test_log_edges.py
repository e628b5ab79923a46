"""Tests of edge cases of a run's log: retries, entries after a gap, and snapshots."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.errors import Conflict, Corrupt, Missing, Unreachable
from rollflow.storage.log import run_log as log_module
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import Body, Claimed, Pruned, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed, EntryRefused, RunState
from rollflow.storage.objects.base import Data, ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import StoredObject
from tests.support.counting import Counting, claims
from tests.support.log_actors import Learner, Scheduler, Supervisor, create_run


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(snapshots, "EVERY", 4)
    monkeypatch.setattr(Counting, "writes", Counter())
    monkeypatch.setattr(Counting, "broken", {})
    return Counting(uuid.uuid4().hex)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace waiting: record the longest possible duration of each pause in a list."""
    found: list[float] = []
    monkeypatch.setattr("rollflow.storage.log.run_log.random.uniform", lambda low, high: high)
    monkeypatch.setattr("rollflow.storage.log.run_log.time.sleep", found.append)
    return found


# --- appending ----------------------------------------------------------------------------------------------------


def test_append_fails_if_storage_never_answers(store: Counting, pauses: list[float]) -> None:
    """Each try waits for the store as long as the store's `patience` allows."""
    log = claims(store, 2)
    Counting.broken["log"] = [Unreachable("no answer") for _ in range(99)]
    with pytest.raises(Unreachable, match=r"^no answer$"):
        log.claim("supervisor")
    assert len(pauses) == log_module.UNANSWERED - 1
    Counting.broken.clear()
    assert log.claim("supervisor").claim == 2


def test_unanswered_append_is_retried_with_growing_pauses(
    store: Counting, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "TRIES", 11)
    log = claims(store, 2)
    monkeypatch.setitem(Counting.broken, "log", [Unreachable("no answer") for _ in range(99)])
    with pytest.raises(Unreachable, match=r"no log entry could be appended to .* in 11 tries: no answer"):
        log.claim("supervisor")
    assert pauses == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]
    assert log.state.n == 1


def test_append_retry_pause_is_random_in_its_upper_half(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return 0.0

    monkeypatch.setattr("rollflow.storage.log.run_log.random.uniform", uniform)
    log = claims(store, 2)
    monkeypatch.setitem(Counting.broken, "log", [Unreachable("no answer")])
    log.claim("supervisor")
    assert drawn == [(0.5, 1.0)]


def test_append_retries_immediately_after_a_lost_race(store: Counting, pauses: list[float]) -> None:
    log, other = claims(store, 2), Log(store)
    for _ in range(5):
        other.claim("supervisor")
    assert log.claim("supervisor").claim == 7
    assert pauses == []


def test_invalid_append_writes_nothing_and_is_not_retried(store: Counting, pauses: list[float]) -> None:
    log, asked = claims(store, 2), 0

    def body(state: RunState, _: StoredObject | None) -> Body:
        nonlocal asked
        asked += 1
        return Pruned(((0, "weights"),))

    learner = log.claim("learner", 1)
    before = Counter(Counting.writes)
    with pytest.raises(EntryRefused, match="version 0 has no weights to prune"):
        learner.append(body)
    assert (asked, pauses) == (1, [])
    assert Counting.writes == before


def test_retried_append_writes_its_data_only_once(store: Counting, pauses: list[float]) -> None:
    """An append is retried because the writer had an old view of the log, another writer was faster, or the store did
    not answer.
    """
    create_run(store)
    supervisor = Supervisor(store)
    learner, scheduler = Learner(store, supervisor.writer.claim), Scheduler(store, supervisor.writer.claim)
    learner.publish()
    scheduler.dispatch(0)  # the group is started under a version that the scheduler's log has not read
    scheduler.dispatch(0)
    Counting.broken["log"] = [Unreachable("no answer"), Conflict("somebody was first"), Unreachable("no answer")]
    scheduler.commit()
    assert Counting.writes["trajectories"] == 1
    (path,) = store.list("trajectories")
    assert Log(store).state.waiting[0].file == StoredObject(
        path, store.stat(path).size, store.put(path, store.get(path))
    )


def test_invalid_batch_is_not_written_to_storage(store: Counting) -> None:
    create_run(store)
    supervisor = Supervisor(store)
    learner, scheduler = Learner(store, supervisor.writer.claim), Scheduler(store, supervisor.writer.claim)
    learner.publish()
    Scheduler(store, supervisor.writer.claim)
    scheduler.log.follow()
    with pytest.raises(Deposed):
        scheduler.commit()
    assert Counting.writes["trajectories"] == 0


def test_batch_file_that_lost_a_race_is_kept_on_a_local_disk(tmp_path: Path) -> None:
    """On a local disk, the writer notices that the entry's name exists before it writes the batch file."""
    run = LocalStore(tmp_path)
    create_run(run)
    supervisor = Supervisor(run)
    learner, scheduler = Learner(run, supervisor.writer.claim), Scheduler(run, supervisor.writer.claim)
    learner.publish()
    scheduler.log.follow()
    Supervisor(run)
    scheduler.commit()
    (path,) = run.list("trajectories")
    assert Log(run).state.waiting[0].file.path == path


def test_role_claim_records_the_claiming_process(store: Counting) -> None:
    create_run(store)
    log = Log(store)
    writer = log.claim("supervisor", who="me", cluster="ours", host="here", process=4)
    written = log.read(writer.claim)
    assert written is not None
    assert written.entry.body == Claimed(None, "me", "ours", "here", 4)
    assert (written.entry.role, written.entry.claim, written.entry.n) == ("supervisor", 1, 1)
    created = log.read(0)
    assert created is not None
    assert (created.entry.role, created.entry.claim, created.entry.prev) == ("creator", 0, "")


# --- following ----------------------------------------------------------------------------------------------------


def test_follow_returns_new_log_entries_in_order(store: Counting) -> None:
    log, other = claims(store, 2), Log(store)
    assert other.follow() == []
    for _ in range(3):
        log.claim("supervisor")
    assert [written.entry.n for written in other.follow()] == [2, 3, 4]
    assert other.follow() == []
    assert other.state == log.state
    assert other.read(5) is None
    assert [other.read(n).sha256 for n in range(5)] == [log.read(n).sha256 for n in range(5)]  # type: ignore[union-attr]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("lost", [3, 4, 5])
def test_opening_a_log_reads_a_missing_entry_from_its_copy(
    store: Counting, tmp_path: Path, local: bool, lost: int
) -> None:
    run = LocalStore(tmp_path) if local else store
    newest = claims(run, 10).state
    for path in list(run.list("log_snapshots")):
        run.delete(path)
    run.delete(entry_path(lost))
    log = Log(run)
    assert log.state == newest
    written = log.read(lost)
    assert written is not None
    assert written.entry.n == lost
    log.settle()


@pytest.mark.parametrize("local", [True, False])
def test_error_names_the_log_entry_after_a_gap(store: Counting, tmp_path: Path, local: bool) -> None:
    run = LocalStore(tmp_path) if local else store
    claims(run, 10)
    for path in [*run.list("log_snapshots"), entry_path(8)]:
        run.delete(path)
    with pytest.raises(
        Corrupt, match=r"0000000008.json is missing, but log/0000000009.json exists; no log segment contains a copy"
    ):
        Log(run)
    run.delete(entry_path(9))
    assert Log(run).state.n == 7
    run.put("log/notes.txt", b"of a person")
    assert Log(run).state.n == 7


def test_opening_a_log_reads_entries_appended_meanwhile(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    other, listed = claims(store, 1), Counting.list

    def busy(self: Counting, prefix: str = "", after: str = "") -> Iterator[str]:
        if prefix == "log" and other.state.n == 0:
            other.claim("supervisor")
            other.claim("supervisor")
        return listed(self, prefix, after)

    monkeypatch.setattr(Counting, "list", busy)
    assert Log(store).state == other.state
    assert other.state.n == 2  # no segment has any of the lost entries


def test_log_whose_only_entry_is_missing_is_corrupt(store: Counting) -> None:
    create_run(store)
    log = Log(store)
    assert log.state.n == 0
    store.delete(entry_path(0))
    with pytest.raises(Corrupt, match=r"0000000000.json is missing"):
        log.read(0)


def test_end_of_a_local_log_is_found_by_probing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_module.AHEAD == 256
    monkeypatch.setattr(log_module, "AHEAD", 4)
    run = LocalStore(tmp_path)
    claims(run, 3)
    run.put(entry_path(7), b"too far")
    assert Log(run).state.n == 2
    run.put(entry_path(6), b"near enough")
    with pytest.raises(Corrupt, match=r"0000000003.json is missing, but log/0000000006.json exists"):
        Log(run)


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_opening_a_log_reads_all_entries_after_a_snapshot(where: str, store: Counting, tmp_path: Path) -> None:
    run: ObjectStore = LocalStore(tmp_path) if where == "folder" else store
    create_run(run)
    for count in range(1, 8):
        assert Log(run).state.n == count - 1
        writer = Log(run)
        writer.claim("supervisor", who=f"supervisor {count}")
        writer.settle()


@pytest.mark.parametrize("kind", [MemoryStore, LocalStore])
def test_append_after_a_lost_race_rewrites_only_the_entry(
    kind: type[MemoryStore] | type[LocalStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another entry is appended after the data was written; the written data is not written again."""
    run = MemoryStore(uuid.uuid4().hex) if kind is MemoryStore else LocalStore(tmp_path)
    named: list[str] = []
    create_naming = kind.create_naming

    def raced(store: ObjectStore, path: str, content: Callable[[str], Data], *rest: Any) -> str:
        def late(sha256: str) -> Data:
            Learner(run, under)
            return content(sha256)

        named.append(path)
        return create_naming(store, path, late, *rest)  # type: ignore[arg-type]

    create_run(run)
    under = Supervisor(run).writer.claim
    Learner(run, under).publish()
    scheduler = Scheduler(run, under)
    monkeypatch.setattr(kind, "create_naming", raced)
    scheduler.commit()
    assert named == [entry_path(5)]
    assert Log(run).state.waiting[0].entry == 6


class Answerless(MemoryStore):
    """A store that writes an entry only at the twentieth request, and answers no request."""

    asked = 0

    def create(self, path: str, data: Data) -> None:
        type(self).asked += 1
        if self.asked == log_module.UNANSWERED:
            super().create(path, data)
        raise Unreachable("no answer")


def test_log_entry_found_at_the_last_try_counts_as_appended(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(Answerless, "asked", 0)
    store = MemoryStore(uuid.uuid4().hex)
    create_run(store)
    assert Log(Answerless(store.name)).claim("supervisor").claim == 1
    assert (Log(store).state.n, Answerless.asked) == (1, log_module.UNANSWERED)


class Late(LocalStore):
    """A store in which entry 4 is missing at its first read."""

    asked = 0

    def get(self, path: str) -> bytes:
        if path == entry_path(4):
            type(self).asked += 1
            if self.asked == 1:
                raise Missing(path)
        return super().get(path)


def test_entry_written_while_a_log_is_opened_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "asked", 0)
    claims(LocalStore(tmp_path), 7)
    assert (Log(Late(tmp_path)).state.n, Late.asked) == (6, 2)


def test_listing_the_log_finds_entries_beyond_its_end(store: Counting) -> None:
    claims(store, 3)
    store.put(entry_path(2 + 2 * log_module.AHEAD), b"far")
    with pytest.raises(Corrupt, match=r"0000000003.json is missing, but log/0000000514.json exists"):
        Log(store)


def test_log_entry_with_a_wrong_copy_is_not_repaired(store: Counting) -> None:
    log = claims(store, 10)
    store.put(entry_path(5), store.get(entry_path(5))[:-1])
    whole = log.read(5)
    assert whole is not None
    segment = store.get(snapshots.segment_path(5)).split(b"\n")
    store.put(snapshots.segment_path(5), b"\n".join([segment[0], segment[2], *segment[2:]]))
    with pytest.raises(
        Corrupt,
        match=r"0000000005.json .*; no log segment contains a copy of this entry, so run `rollflow audit --repair`",
    ):
        log.read(5)
