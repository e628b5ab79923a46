"""Tests of the log's snapshots and segments: which ones are written, which ones are read, and which calls wait for
them.
"""

from __future__ import annotations

import json
import math
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import pytest

from rollflow.storage.errors import Missing, StoreFailed
from rollflow.storage.log import run_log as log_module
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import Role, entry_path, open_sealed, seal_tree
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import FOLD, RunState
from rollflow.storage.objects.memory import MemoryStore
from tests.support.counting import Counting, claims
from tests.support.log_actors import Learner, Supervisor, create_run, entries
from tests.support.waiting import HANG_SECONDS


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(snapshots, "EVERY", 4)
    monkeypatch.setattr(Counting, "writes", Counter())
    monkeypatch.setattr(Counting, "broken", {})
    return Counting(uuid.uuid4().hex)


def test_newest_log_snapshots_and_all_segments_are_kept(store: Counting) -> None:
    log = claims(store, 22)
    assert (snapshots.KEPT, len(entries(store))) == (3, 22)
    hashes = [log.read(n).sha256 for n in (11, 15, 19)]  # type: ignore[union-attr]
    names = [snapshots.snapshot_path(n, sha256) for n, sha256 in zip((11, 15, 19), hashes, strict=True)]
    assert list(store.list("log_snapshots")) == names
    assert [snapshots.from_bytes(store.get(name)).n for name in names] == [11, 15, 19]
    assert list(store.list("log_segments")) == [f"log_segments/{n:010d}.jsonl" for n in range(0, 20, 4)]
    assert [snapshots.from_segment(store, n) for n in range(20)] == list(entries(store))[:20]
    with pytest.raises(Missing):
        snapshots.from_segment(store, 20)


def test_log_snapshot_is_written_by_a_daemon_thread(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool, RunState]] = []

    def seal(log: Log, state: RunState) -> None:
        thread = threading.current_thread()
        seen.append((thread is threading.main_thread(), thread.daemon, state))

    monkeypatch.setattr(Log, "_seal", seal)
    claims(store, 9)
    assert [one[:2] for one in seen] == [(False, True)] * 2
    assert [state.n for _, _, state in seen] == [3, 7]


def test_publisher_waits_for_all_pending_log_snapshots(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the two pending snapshots takes longer than the second."""
    done: list[int] = []
    gate = threading.Event()

    def seal(log: Log, state: RunState) -> None:
        assert state.n != 3 or gate.wait(HANG_SECONDS)
        done.append(state.n)

    monkeypatch.setattr(Log, "_seal", seal)
    create_run(store)
    log = Log(store)
    for _ in range(8):
        log.claim("supervisor")
    threading.Timer(0.1, gate.set).start()
    log.settle()
    assert sorted(done) == [3, 7]


def test_existing_segment_of_the_log_is_not_rewritten(store: Counting) -> None:
    claims(store, 9)
    store.put(snapshots.segment_path(0), b"first")
    snapshots.keep_segments(store, 3)
    assert store.get(snapshots.segment_path(0)) == b"first"
    with pytest.raises(Missing, match="is truncated"):
        snapshots.from_segment(store, 2)


def test_missing_log_segment_is_written_with_the_next_one(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment with a lost entry is not written, but other segments are."""
    monkeypatch.setitem(Counting.broken, "log_segments", [StoreFailed("full") for _ in range(3)])
    log = claims(store, 9)
    assert list(store.list("log_segments")) == []
    store.delete(entry_path(1))
    for _ in range(4):
        log.claim("supervisor")
    log.settle()
    assert list(store.list("log_segments")) == [snapshots.segment_path(n) for n in (4, 8)]
    assert snapshots.from_segment(store, 5) == store.get(entry_path(5))


def test_full_disk_for_a_log_snapshot_does_not_stop_the_run(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("log_snapshots", "log_segments"):
        monkeypatch.setitem(Counting.broken, folder, [StoreFailed("full") for _ in range(9)])
    log = claims(store, 10)
    assert list(store.list("log_snapshots")) == list(store.list("log_segments")) == []
    assert Log(store).state == log.state


def test_log_snapshot_of_other_log_rules_is_ignored(store: Counting) -> None:
    claims(store, 6)
    (newest,) = store.list("log_snapshots")
    tree = open_sealed(store.get(newest))
    assert tree["fold"] == FOLD
    with pytest.raises(ValueError, match="another version of the log's rules"):
        snapshots.from_bytes(seal_tree(tree | {"fold": FOLD + 1}))
    with pytest.raises(ValueError, match="the object was altered"):
        snapshots.from_bytes(json.dumps(tree).encode())


@pytest.mark.parametrize(
    "junk", [b"", b"7", b"null", b'"text"', b"[]", b"{}", seal_tree({}), seal_tree({"fold": 1, "state": 3})]
)
def test_newest_readable_log_snapshot_is_used(store: Counting, junk: bytes) -> None:
    newest = claims(store, 14).state
    store.put("log_snapshots/notes.txt", b"of a person")
    _, seventh, eleventh = (path for path in store.list("log_snapshots") if path.endswith(".json"))
    assert snapshots.newest_snapshot(store).n == 11
    store.put(eleventh, junk)
    assert snapshots.newest_snapshot(store).n == 7
    store.put(eleventh, store.get(seventh))  # an intact snapshot under the name of another snapshot
    assert snapshots.newest_snapshot(store).n == 7
    store.delete(entry_path(7))  # without this entry, the snapshot may belong to another log
    assert snapshots.newest_snapshot(store).n == 3
    assert Log(store).state == newest


def test_empty_log_has_the_empty_state(store: Counting) -> None:
    state = Log(store).state
    assert state == RunState()
    assert (state.n, state.sha256, state.version, state.published, state.next_batch) == (-1, "", -1, -1, 0)
    assert (state.alpha, state.group_size, state.voids) == (0, 1, 0)


ROLES: tuple[Role, ...] = ("supervisor", "scheduler", "learner")


def test_unclaimed_role_has_the_claim_number_minus_1(store: Counting) -> None:
    state = claims(store, 3).state
    assert [state.newest_claim(role) for role in ROLES] == [2, -1, -1]


class Crowded(MemoryStore):
    """A store whose reads of log entries wait until a given number of reads is pending."""

    crowd: ClassVar[threading.Barrier | None] = None

    def get(self, path: str) -> bytes:
        if self.crowd is not None and path.startswith("log/"):
            self.crowd.wait(HANG_SECONDS)
        return super().get(path)


@pytest.mark.parametrize("window", [4, 1_024])
def test_log_entries_after_a_snapshot_are_read_in_parallel(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """If the log has no snapshot, its entries are read in windows of limited size."""
    store = Crowded(uuid.uuid4().hex)
    create_run(store)
    learner = Learner(store, Supervisor(store).writer.claim)
    learner.publish()  # the log now has four entries
    for _ in range(4):
        learner = Learner(store, learner.log.state.newest_claim("supervisor"))
    held: list[int] = []
    read_ahead = Log._read_ahead

    def noted(log: Log, numbers: Sequence[int]) -> None:
        read_ahead(log, numbers)
        held.append(len(log._ahead))

    monkeypatch.setattr(log_module, "WINDOW", window)
    monkeypatch.setattr(Log, "_read_ahead", noted)
    monkeypatch.setattr(Log, "_goes_on", lambda log: False)
    monkeypatch.setattr(Log, "_follow", lambda log, last=math.inf, follow=Log._follow: follow(log, min(last, 7)))
    monkeypatch.setattr(Crowded, "crowd", threading.Barrier(4))
    assert Log(store).state.n == 7
    assert held == ([4, 4] if window == 4 else [8])
