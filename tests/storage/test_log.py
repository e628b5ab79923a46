"""Tests of a run's log: appending and reading entries, damage, and snapshots. The module `test_fold` tests the rules of
the log.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.storage.audit.repair import plan_repairs, repair
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.errors import Conflict, Corrupt, Missing, Unreachable
from rollflow.storage.log import run_log as log_module
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Entry,
    RunCreated,
    TrainedGroup,
    decode,
    encode,
    entry_path,
)
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import Deposed, EntryRefused
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    GroupKey,
    StopReason,
    StoredObject,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.trajectories import committed_group
from tests.support.counts import ALL
from tests.support.log_actors import Learner, Scheduler, Supervisor, chained, create_run, entries

WRITERS = ("scheduler", "learner")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a snapshot after every fourth entry."""
    monkeypatch.setattr(snapshots, "EVERY", 4)


def train(store: MemoryStore | LocalStore, versions: int) -> tuple[Supervisor, Scheduler, Learner]:
    """Train a new run for `versions` policy versions."""
    create_run(store)
    supervisor = Supervisor(store)
    scheduler, learner = Scheduler(store, supervisor.writer.claim), Learner(store, supervisor.writer.claim)
    learner.publish()
    for _ in range(versions):
        scheduler.log.follow()
        scheduler.commit()
        learner.log.follow()
        learner.publish()
        learner.prune()
    for log in (supervisor.log, scheduler.log, learner.log):
        log.settle()
    return supervisor, scheduler, learner


def test_all_readers_see_one_order_of_log_entries(store: MemoryStore) -> None:
    supervisor, scheduler, learner = train(store, 5)
    for log in (supervisor.log, scheduler.log, learner.log):
        log.follow()
    fresh = Log(store).state
    assert fresh == supervisor.log.state == scheduler.log.state == learner.log.state
    assert (fresh.version, fresh.next_batch) == (5, 5)
    assert fresh.totals.groups == {"trained": 10}
    assert chained(entries(store))


def test_run_is_created_only_once(store: MemoryStore) -> None:
    create_run(store)
    with pytest.raises(Conflict):
        create_run(store)


def test_append_retried_after_a_lost_race_writes_data_once(store: MemoryStore) -> None:
    create_run(store)
    supervisor = Supervisor(store)
    scheduler = Scheduler(store, supervisor.writer.claim)
    learner = Learner(store, supervisor.writer.claim)  # the scheduler has not read this entry
    learner.publish()  # the scheduler has not read this entry either
    scheduler.dispatch(0)
    scheduler.dispatch(0)
    scheduler.commit()
    files = list(store.list("trajectories"))
    assert len(files) == 1
    assert scheduler.log.state.waiting[0].file.path == files[0]
    assert Log(store).state == scheduler.log.state


def test_role_check_of_a_replaced_process_fails(store: MemoryStore) -> None:
    create_run(store)
    supervisor = Supervisor(store).writer
    learner = Log(store).claim("learner", supervisor.claim)
    learner.check()
    Learner(store, supervisor.claim)
    assert learner.valid()  # the learner has not read the entry that deposes it
    with pytest.raises(Deposed, match="the run has another learner now"):
        learner.check()
    assert not learner.valid()
    supervisor.check()  # no other process has claimed this role


def test_replaced_process_cannot_append_to_the_log(store: MemoryStore) -> None:
    create_run(store)
    supervisor = Supervisor(store)
    scheduler, learner = Scheduler(store, supervisor.writer.claim), Learner(store, supervisor.writer.claim)
    learner.publish()
    another = Scheduler(store, supervisor.writer.claim)
    scheduler.dispatch(0)
    scheduler.dispatch(0)
    with pytest.raises(Deposed, match="this scheduler stops"):
        scheduler.commit()
    assert not scheduler.writer.valid()
    another.commit()
    assert another.writer.valid()


def test_supervisor_restart_keeps_healthy_scheduler_and_learner(store: MemoryStore) -> None:
    create_run(store)
    old = Supervisor(store)
    scheduler, learner = Scheduler(store, old.writer.claim), Learner(store, old.writer.claim)
    learner.publish()
    new = Supervisor(store)
    scheduler.log.follow()
    scheduler.commit()
    learner.log.follow()
    learner.publish()
    with pytest.raises(Deposed):
        Learner(store, old.writer.claim)
    with pytest.raises(Deposed, match="under the newest supervisor"):
        Log(store).claim("learner", cluster="another")
    old.log.follow()
    assert not old.writer.valid()
    Learner(store, new.writer.claim)
    learner.log.follow()
    with pytest.raises(Deposed):
        learner.prune()


# --- a store whose writes fail ---------------------------------------------------------------------------------


class Failing(MemoryStore):
    """A store whose writes raise an error before or after the write, as `fault` says for each path."""

    fault: Callable[[str], str] = staticmethod(lambda path: "")

    def create(self, path: str, data: Data) -> None:
        self._done(path, lambda: MemoryStore.create(self, path, data))

    def put(self, path: str, data: Data) -> str:
        return str(self._done(path, lambda: MemoryStore.put(self, path, data)))

    def _done(self, path: str, write: Callable[[], object]) -> object:
        fault = type(self).fault(path)
        if fault == "before":
            raise Unreachable(f"{path}: not written")
        found = write()
        if fault == "after":
            raise Unreachable(f"{path}: written, and the answer was lost")
        if fault == "killed":
            raise KeyboardInterrupt
        return found


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    monkeypatch.setattr(log_module, "FIRST_PAUSE", 0.0)
    yield Failing(uuid.uuid4().hex)
    Failing.fault = staticmethod(lambda path: "")


@pytest.mark.parametrize("fault", ["before", "after"])
def test_append_with_a_lost_response_is_stored_once(failing: Failing, fault: str) -> None:
    create_run(failing)
    supervisor = Supervisor(failing)
    scheduler, learner = Scheduler(failing, supervisor.writer.claim), Learner(failing, supervisor.writer.claim)
    draw, met = random.Random(0), 0

    def chance(path: str) -> str:
        nonlocal met
        if path.startswith("log/") and draw.random() < 0.5:
            met += 1
            return fault
        return ""

    Failing.fault = staticmethod(chance)
    learner.publish()
    for _ in range(10):
        scheduler.log.follow()
        scheduler.commit()
        learner.log.follow()
        learner.publish()
    assert met > 5
    state = Log(failing).state
    assert (state.version, state.next_batch, state.totals.groups) == (10, 10, {"trained": 20})
    assert len(entries(failing)) == 4 + 21  # the creation, three claims, eleven versions, ten batches


def test_log_continues_after_a_kill_at_any_write(failing: Failing) -> None:
    """After a kill at any write, a committed entry is in the log once, and an entry that was not committed is not in
    the log.
    """
    create_run(failing)
    supervisor = Supervisor(failing)
    writes = 0
    for victim in range(40):
        writes = 0

        def nth(path: str, victim: int = victim) -> str:
            nonlocal writes
            if path.startswith("log_"):
                return ""  # background writes of snapshots never fail
            writes += 1
            return "killed" if writes == victim % 13 + 1 else ""

        Failing.fault = staticmethod(nth)
        try:
            scheduler, learner = Scheduler(failing, supervisor.writer.claim), Learner(failing, supervisor.writer.claim)
            if learner.log.state.version < 0:
                learner.publish()
            for _ in range(2):
                scheduler.log.follow()
                if scheduler.next <= scheduler.log.state.version:
                    scheduler.commit()
                learner.log.follow()
                learner.publish()
                learner.prune()
        except KeyboardInterrupt:
            pass
    Failing.fault = staticmethod(lambda path: "")
    state = Log(failing).state
    assert state.version > 10
    assert state.totals.groups["trained"] == 2 * state.version
    assert chained(entries(failing))
    again = replayed(failing)
    assert again == state


def replayed(store: MemoryStore) -> object:
    """Return the run's state, computed from the log entries alone, without any snapshot."""
    copy = MemoryStore(uuid.uuid4().hex)
    for prefix in ("log", "log_index"):
        for path in store.list(prefix):
            copy.put(path, store.get(path))
    return Log(copy).state


# --- concurrent writers and readers ----------------------------------------------------------------------------


@pytest.mark.many
def test_concurrent_writers_and_readers_agree_and_all_progress(tmp_path: Path) -> None:
    """Two writers of each role and ten readers use a folder; the two writers of a role keep deposing each other."""
    store = LocalStore(tmp_path)
    create_run(store)
    supervisor = Supervisor(store)
    Learner(store, supervisor.writer.claim).publish()
    target, stop, failures = 1_000 if ALL else 150, threading.Event(), []
    pruned = threading.Event()
    refused: Counter[str] = Counter()
    appended = dict.fromkeys(["scheduler", "learner", "supervisor"], 0)

    def newest() -> int:
        return Log(store).state.newest_claim("supervisor")

    def work(role: str, step: Callable[[], None]) -> None:
        draw = random.Random(threading.get_ident())
        while not stop.is_set():
            try:
                step()
                appended[role] += 1
            except (EntryRefused, KeyError):
                refused[role] += 1
                stop.wait(draw.uniform(0, 0.01))
            except Exception as error:  # noqa: BLE001 - the test reports any error
                failures.append(error)
                stop.set()

    def schedule() -> None:
        scheduler = Scheduler(store, newest())
        for _ in range(3):
            scheduler.log.follow()
            if scheduler.next <= scheduler.log.state.version + 2:
                scheduler.commit()

    def learn() -> None:
        learner = Learner(store, newest())
        for _ in range(3):
            learner.log.follow()
            learner.publish()
            learner.prune()
            pruned.set()

    def supervise() -> None:
        Supervisor(store)
        stop.wait(0.05)

    def read() -> None:
        log = Log(store)
        while not stop.is_set():
            before = log.state.n
            log.follow()
            assert log.state.n >= before
            stop.wait(0.001)

    def met() -> bool:
        return pruned.is_set() and min(appended.values()) > 0 and min(refused[role] for role in WRITERS) > 0

    with ThreadPoolExecutor(16) as pool:
        readers = [pool.submit(read) for _ in range(10)]
        for role, step in (("scheduler", schedule), ("learner", learn), ("supervisor", supervise)):
            for _ in range(2):
                pool.submit(work, role, step)
        # on a busy machine, more entries may pass until a learner prunes and the writers of each role have deposed each
        # other
        deadline = time.monotonic() + 300
        while not (Log(store).state.n >= target and met()) and not failures and time.monotonic() < deadline:
            stop.wait(0.1)
        stop.set()
        for reader in readers:
            reader.result()
    assert not failures
    data = [store.get(path) for path in store.list("log")]
    assert chained(data)
    kinds = {json.loads(one)["body"]["kind"] for one in data}
    assert kinds >= {"batch-committed", "version-published", "pruned", "claimed"}
    assert min(appended.values()) > 0, (appended, refused)
    assert min(refused[role] for role in WRITERS) > 0, "nobody met anybody"
    state = Log(store).state
    assert state.totals.groups["trained"] == 2 * state.version


# --- damaged log entries ---------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


@pytest.mark.parametrize("how", ["altered", "missing", "cut"])
def test_damaged_log_entry_is_read_from_its_segment_copy(store: MemoryStore, how: str) -> None:
    train(store, 6)
    newest, path = Log(store).state, entry_path(5)
    whole = store.get(path)
    for snapshot in store.list("log_snapshots"):
        store.delete(snapshot)
    if how == "missing":
        store.delete(path)
    else:
        store.put(path, flipped(whole) if how == "altered" else whole[:-9])
    log = Log(store)
    written = log.read(5)
    assert written is not None
    assert encode(written.entry).data == whole
    assert log.state == newest


def test_missing_log_entry_without_a_copy_stops_all_readers(store: MemoryStore) -> None:
    train(store, 6)
    for path in (*store.list("log_snapshots"), *store.list("log_segments")):
        store.delete(path)
    store.delete(entry_path(5))
    with pytest.raises(Corrupt, match=r"log/0000000005.json is missing, but log/0000000006.json exists"):
        Log(store)


@pytest.mark.parametrize("how", ["altered", "cut", "forged"])
def test_damaged_newest_log_entry_stops_all_readers(store: MemoryStore, how: str) -> None:
    """Only the checksum (seal) and the log's rules can verify the newest entry, because no later entry names its
    hash.
    """
    *_, learner = train(store, 3)
    n = learner.log.claim("supervisor", who="the last").claim
    data = store.get(entry_path(n))
    if how == "altered":
        store.put(entry_path(n), flipped(data))
    elif how == "cut":
        store.put(entry_path(n), data[:-20])
    else:
        forged = replace(decode(data, n, store.get).entry, prev="0" * 64)
        store.put(entry_path(n), encode(forged).data)
    with pytest.raises(Corrupt, match=f"{n:010d}"):
        Log(store)


def test_swapped_and_inserted_log_entries_are_detected(store: MemoryStore) -> None:
    train(store, 6)
    for path in (*store.list("log_snapshots"), *store.list("log_segments")):
        store.delete(path)
    fifth, sixth = store.get(entry_path(5)), store.get(entry_path(6))
    store.put(entry_path(5), sixth)
    store.put(entry_path(6), fifth)
    with pytest.raises(Corrupt, match=r"contains entry 6"):
        Log(store)
    store.put(entry_path(6), sixth)
    another = replace(decode(fifth, 5, store.get).entry, id="another")
    store.put(entry_path(5), encode(another).data)
    with pytest.raises(Corrupt, match=r"0000000006.json is refused by the log's rules"):
        Log(store)


# --- snapshots -------------------------------------------------------------------------------------------------


def test_log_is_opened_from_newest_snapshot_and_later_entries(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, learner = train(store, 12)
    newest = learner.log.state
    read: list[str] = []
    get = MemoryStore.get
    monkeypatch.setattr(MemoryStore, "get", lambda self, path: (read.append(path), get(self, path))[1])
    assert Log(store).state == newest
    assert len([path for path in read if path.startswith("log/")]) <= 4 + 2
    assert len(list(store.list("log_snapshots"))) <= snapshots.KEPT


@pytest.mark.parametrize("how", ["altered", "another fold", "of another log", "not JSON"])
def test_invalid_log_snapshot_is_ignored(store: MemoryStore, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, learner = train(store, 6)
    newest = learner.log.state
    for path in list(store.list("log_snapshots")):
        data = store.get(path)
        if how == "altered":
            store.put(path, flipped(data))
        elif how == "not JSON":
            store.put(path, b"[")
        elif how == "another fold":
            with monkeypatch.context() as patched:
                patched.setattr(snapshots, "FOLD", 0)
                store.put(path, snapshots.to_bytes(newest))
        else:
            other = newest.copy()
            other.version, other.sha256 = 99, "f" * 64
            store.put(path, snapshots.to_bytes(other))
    assert Log(store).state == newest


def test_opening_a_log_writes_a_missing_snapshot(store: MemoryStore) -> None:
    *_, learner = train(store, 6)
    segments = list(store.list("log_segments"))
    assert len(segments) == (learner.log.state.n + 1) // 4
    for path in (*store.list("log_snapshots"), *segments):
        store.delete(path)
    Log(store).settle()
    assert list(store.list("log_snapshots"))
    assert list(store.list("log_segments")) == segments


def test_snapshot_restores_the_same_state(store: MemoryStore) -> None:
    _, scheduler, learner = train(store, 3)
    scheduler.log.follow()
    for _ in range(3):
        scheduler.dispatch(3)
    scheduler.discard(0, DiscardReason.STALE)
    scheduler.discard(0, DiscardReason.FILTERED)
    scheduler.commit()
    learner.log.follow()
    learner.void(3, "not-finite")
    state = learner.log.state
    assert state.behind
    assert (state.not_finite, list(state.redraws.values())) == (1, [1, 1])
    assert state.holes == [3]
    assert state.open
    assert snapshots.from_bytes(snapshots.to_bytes(state)) == state


# --- the contents of an entry ----------------------------------------------------------------------------------


def test_long_log_entry_stores_its_lists_in_an_index_object(store: MemoryStore) -> None:
    create_run(store)
    supervisor = Supervisor(store)
    learner, scheduler = Learner(store, supervisor.writer.claim), Scheduler(store, supervisor.writer.claim)
    learner.publish()
    scheduler.log.follow()
    count = 12_000
    for _ in range(count):
        scheduler.dispatch(0)
    for _ in range(count - 2):
        scheduler.discard(2, DiscardReason.FAILED)
    entry = scheduler.commit()
    assert len(store.get(entry_path(entry.n))) < 4_000
    (index,) = store.list("log_index")
    log = Log(store)
    assert log.state == scheduler.log.state
    assert len(log.state.open) == count - 2
    store.put(index, flipped(store.get(index)))
    for snapshot in (*store.list("log_snapshots"), *store.list("log_segments")):
        store.delete(snapshot)
    with pytest.raises(Corrupt, match=r"log_index/.* was altered"):
        Log(store)


def test_log_entry_is_read_as_written() -> None:
    file = StoredObject("trajectories/x.arrow", 3, "ab")
    discard = Discard(GroupKey(4, 1), DiscardReason.STALE, 2, 9)
    body = BatchCommitted(3, file, 8, (TrainedGroup(1, 0, 2, 3, 11),), (5, 6), (discard,), 4)
    entry = Entry(7, "aa", "id", "scheduler", 3, 2, 4, 1.5, body)
    encoded = encode(entry)
    assert decode(encoded.data, 7, lambda path: b"").entry == entry
    assert json.loads(encoded.data)["body"]["discards"] == [[[4, 1], "stale", 2, 9]]


def test_log_entry_of_a_batch_has_its_oldest_and_newest_version() -> None:
    def trajectory(sample: int, started: int, versions: tuple[int, ...]) -> Trajectory:
        chosen = tuple(version >= 0 for version in versions)
        quiet = (0.0,) * len(versions)
        return Trajectory(sample, started, versions, chosen, quiet, versions, 1.0, "", StopReason.STOP)

    group = TrajectoryGroup(GroupKey(5, 1), "p", "d", (trajectory(0, 3, (-1, 3, 4, -1)), trajectory(1, 2, (-1, 2))))
    assert committed_group(group) == committed_group(pack_group(group)) == TrainedGroup(5, 1, 2, 4, 3)
    silent = TrajectoryGroup(GroupKey(5, 1), "p", "d", (trajectory(0, 3, (-1,)),))
    assert committed_group(silent) == committed_group(pack_group(silent)) == TrainedGroup(5, 1, 3, 3, 0)
    batches = [TrajectoryBatch.from_groups(rows) for rows in ((group, silent), (pack_group(group), pack_group(silent)))]
    assert batches[0].to_bytes() == batches[1].to_bytes()
    assert batches[0].to_bytes() == TrajectoryBatch.from_groups((group, pack_group(silent))).to_bytes()
    assert len(TrajectoryBatch.from_groups(())) == 0
    assert pack_group(replace(group, surplus_tokens=7)).surplus_tokens == 7


def test_process_without_the_role_cannot_append_to_the_log(store: MemoryStore) -> None:
    create_run(store)
    log = Log(store)
    supervisor = log.claim("supervisor")
    with pytest.raises(EntryRefused, match="a supervisor must not append an entry of kind run-created"):
        supervisor.append(lambda state, _: RunCreated("x", {}, "", 1))
    with pytest.raises(Deposed):
        Writer(log, "learner", 0).append(lambda state, _: BatchVoided(0, 0, "never claimed"))


# --- repair ----------------------------------------------------------------------------------------------------


def test_intact_log_needs_no_repair(store: MemoryStore) -> None:
    train(store, 3)
    assert plan_repairs(store) == []
    with pytest.raises(Missing):
        plan_repairs(MemoryStore(uuid.uuid4().hex))


def test_log_repair_restores_entries_from_segment_copies(store: MemoryStore) -> None:
    train(store, 6)
    whole = entries(store)
    store.put(entry_path(5), flipped(whole[5]))
    store.delete(entry_path(9))
    found = plan_repairs(store)
    assert [cure.n for cure in found] == [5, 9]
    assert all("restore the entry from its segment" in str(cure) for cure in found)
    repair(store, found)
    assert entries(store) == whole
    assert plan_repairs(store) == []


@pytest.mark.parametrize("how", ["altered", "forged"])
def test_log_repair_moves_a_damaged_newest_entry_away(store: MemoryStore, how: str) -> None:
    _, scheduler, learner = train(store, 3)
    scheduler.log.follow()
    before = scheduler.log.state
    n = scheduler.commit().n
    data = store.get(entry_path(n))
    forged = encode(replace(decode(data, n, store.get).entry, batch=99)).data
    store.put(entry_path(n), flipped(data) if how == "altered" else forged)
    (cure,) = plan_repairs(store)
    assert str(cure).startswith(entry_path(n))
    assert f"the log ends with entry {n - 1}" in str(cure)
    with pytest.raises(Corrupt):
        Log(store)
    repair(store, [cure])
    assert Log(store).state == before
    assert store.exists(f"log_damaged/{n:010d}.json")
    another = Scheduler(store, learner.log.state.newest_claim("supervisor"))
    another.commit()
    assert Log(store).state.next_batch == 4


def test_damaged_log_entry_without_a_copy_cannot_be_repaired(store: MemoryStore) -> None:
    train(store, 6)
    for path in (*store.list("log_snapshots"), *store.list("log_segments")):
        store.delete(path)
    store.put(entry_path(5), flipped(store.get(entry_path(5))))
    with pytest.raises(Corrupt, match=r"0000000005.json .* entries follow it"):
        plan_repairs(store)


def test_log_repair_counts_the_entries_after_the_damage(store: MemoryStore) -> None:
    """Numbers that are missing before a stray entry are not counted."""
    create_run(store)
    supervisor = Supervisor(store)
    Scheduler(store, supervisor.writer.claim), Learner(store, supervisor.writer.claim)
    for path in list(store.list("log_segments")):
        store.delete(path)
    newest = len(list(store.list("log"))) - 1
    store.put(entry_path(900), store.get(entry_path(1)))
    with pytest.raises(Corrupt, match=rf"{newest + 1:010d}.json is missing, .* and entry 900 follows it"):
        plan_repairs(store)
    store.delete(entry_path(2))
    with pytest.raises(Corrupt, match=rf"0000000002.json is missing, .* and {newest - 1} entries follow it"):
        plan_repairs(store)
