"""Tests of garbage collection: exactly the objects that no entry can name any more are garbage."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.garbage import collect, list_abandoned, list_orphans, store_clock, sweep
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import Claimed, Entry, Pruned, VersionPublished, encode, entry_path
from rollflow.storage.log.retention import KINDS
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import DiscardReason
from tests.support.batches import begin, train
from tests.support.counts import examples
from tests.support.log_actors import Learner, Supervisor
from tests.support.log_runs import Actors, RealScheduler, committed, forget, of_kind
from tests.support.s3_server import s3_server, use
from tests.support.uploads import BUCKET, PART, begun, ended, grow_old, uploads

DAY = 24 * 3600.0


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def age(run: LocalStore, path: str, days: float) -> None:
    then = store_clock(run) - days * DAY
    os.utime(run.local_path(path), (then, then))


def left_by(actors: Actors, run: LocalStore) -> list[str]:
    """Return the objects that a learner and a scheduler wrote before they died, and that no log entry names."""
    learner, scheduler = actors.learner.writer.claim, actors.scheduler.writer.claim
    paths = [
        f"policies/00000009/{learner}/weights.safetensors",
        f"policies/00000001/{learner}/shards/a.safetensors",
        f"trajectories/00000009-{scheduler}-0a1b2c3d.arrow",
    ]
    for path in paths:
        run.put(path, b"left")
    return paths


def test_object_of_a_replaced_process_is_garbage(run: LocalStore) -> None:
    actors = Actors.begin(run).train(2)
    left = left_by(actors, run)
    for path in left:
        age(run, path, 100)
    assert list_orphans(run, store_clock(run)) == []
    new = Supervisor(run)  # a new supervisor does not replace a healthy scheduler or learner
    assert list_orphans(run, store_clock(run)) == []
    fresh = left_by(actors, run)
    Learner(run, new.writer.claim)
    assert [orphan.path for orphan in list_orphans(run, store_clock(run))] == sorted(fresh[:2])
    RealScheduler(run, new.writer.claim)
    found = list_orphans(run, store_clock(run))
    assert [(orphan.path, orphan.size, orphan.why) for orphan in found] == [
        (path, 4, "no entry names the object, and its writer was superseded") for path in sorted(left)
    ]
    before = set(run.list())
    assert collect(run, found) == 12
    assert set(run.list()) == before - set(left)
    assert list_orphans(run, store_clock(run)) == []
    assert audit(run, deep=True).violations == []


def test_orphaned_objects_below_the_age_limit_are_not_listed(run: LocalStore) -> None:
    actors = Actors.begin(run).train(1)
    left = left_by(actors, run)
    age(run, left[0], 3)
    new = Supervisor(run)
    Learner(run, new.writer.claim)
    assert [orphan.path for orphan in list_orphans(run, store_clock(run), 2 * DAY)] == left[:1]


def test_object_that_should_have_been_deleted_is_garbage(run: LocalStore) -> None:
    """For each version, the learner is killed after it has appended the pruning entry and before it deletes the
    objects.
    """
    actors = Actors.begin(run)
    for _ in range(9):
        actors.train(1, prune=False)
        if actors.learner.log.state.releasable:
            actors.learner.prune()  # the learner dies before it deletes any object
    found = list_orphans(run, store_clock(run))
    state = Log(run).state
    gone = {
        stored.path
        for entry in of_kind(run, VersionPublished)
        for kind in ("weights", "state")
        for stored in getattr(entry.body, kind)
        if not state.retention.is_needed(kind, entry.version, state.version)  # type: ignore[arg-type]
    }
    assert {orphan.path for orphan in found} == gone
    assert gone
    assert {orphan.why for orphan in found} >= {"version 1 no longer needs its weights"}
    collect(run, found)
    assert audit(run, deep=True).violations == []


@pytest.mark.many
@given(st.lists(st.sampled_from(["lives", "before", "after"]), min_size=1, max_size=12))
@settings(deadline=None, max_examples=examples(300))
def test_objects_of_killed_learners_are_deleted_or_garbage(ends: list[str]) -> None:
    """The learner is killed before or after it appends the pruning entry. At the end, exactly the needed objects
    exist.
    """
    store = MemoryStore(uuid.uuid4().hex)
    begin(store, keep_last=2, keep_every=4, state_every=2)
    for end in [*ends, "lives"]:
        policies, writer = train(store, 1)
        released = policies.log.state.releasable
        if end == "lives":
            policies.prune(writer)
        elif end == "after" and released:
            writer.append(lambda state, _, released=released: Pruned(tuple(released)))  # type: ignore[misc]
    left = set(store.list("policies")) - needed(store)
    found = list_orphans(store, store_clock(store))
    assert {orphan.path for orphan in found} == left
    assert bool(left) <= ("after" in ends)
    collect(store, found)
    assert set(store.list("policies")) == needed(store)
    assert list_orphans(store, store_clock(store)) == []


def needed(store: ObjectStore) -> set[str]:
    """Return the objects of policy versions that must exist."""
    state, found = Log(store).state, set()
    for entry in of_kind(store, VersionPublished):
        assert isinstance(entry.body, VersionPublished)
        kept = [kind for kind in KINDS if state.retention.is_needed(kind, entry.body.number, state.version)]
        found |= {stored.path for kind in kept for stored in getattr(entry.body, kind)}
    return found


def test_policy_version_under_evaluation_is_not_garbage(run: LocalStore) -> None:
    """If a learner postpones a pruning and dies, the next learner prunes the version."""
    begin(run, keep_last=2, keep_every=100)
    policies, writer = train(run, 8)
    weights = policies.find(3).weights[0].path
    PolicyStore(policies.log, in_use=lambda version: version == 3).prune(writer)
    train(run, 1)
    age(run, weights, 100)
    assert list_orphans(run, store_clock(run)) == []
    assert run.exists(weights)


def test_old_weights_are_not_garbage_before_their_prune_entry(run: LocalStore) -> None:
    Actors.begin(run).train(9, prune=False)
    assert Log(run).state.releasable
    assert list_orphans(run, store_clock(run)) == []


def test_voided_batch_file_is_not_garbage(run: LocalStore) -> None:
    actors = Actors.begin(run)
    actors.ahead()
    actors.learner.log.follow()
    actors.learner.void(0)
    new = Supervisor(run)
    RealScheduler(run, new.writer.claim).commit()
    assert len(list(run.list("trajectories"))) == 2
    assert list_orphans(run, store_clock(run)) == []


def test_object_with_an_unknown_path_is_not_garbage(run: LocalStore) -> None:
    """The path of the object names no claim, a claim that is not in the log, or an entry that is not a claim."""
    actors = Actors.begin(run).train(1)
    published = actors.learner.log.state.published
    strange = [
        "policies/00000001/readme.txt",
        "policies/00000001/999/weights.safetensors",
        f"policies/00000001/{published}/weights.safetensors",
        "trajectories/notes.arrow",
        "trajectories/00000001-x-0a.arrow",
        "policy/config.json",
        "log/notes.txt",
        "journal/1.json",
    ]
    for path in strange:
        run.put(path, b"?")
        age(run, path, 100)
    new = Supervisor(run)
    Learner(run, new.writer.claim)
    RealScheduler(run, new.writer.claim)
    assert list_orphans(run, store_clock(run)) == []


def test_unreferenced_index_object_is_garbage_after_a_week(run: LocalStore) -> None:
    actors = Actors.begin(run)
    for _ in range(12_000):
        actors.scheduler.dispatch(0)
    for _ in range(11_998):
        actors.scheduler.discard(2, DiscardReason.FAILED)
    actors.ahead()
    [named] = run.list("log_index")
    for name, days in (("ab", 8), ("cd", 6), ("ef", 0)):
        run.put(f"log_index/{name}.json", b"{}")
        age(run, f"log_index/{name}.json", days)
    age(run, named, 100)
    assert [(o.path, o.why) for o in list_orphans(run, store_clock(run))] == [
        ("log_index/ab.json", "no entry names this index")
    ]
    assert list_orphans(run, store_clock(run), 9 * DAY) == []


@pytest.mark.parametrize("segments", [True, False])
def test_garbage_collection_refuses_a_damaged_log(
    run: LocalStore, segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If segments have copies of all damaged entries, garbage is still found."""
    monkeypatch.setattr("rollflow.storage.log.snapshots.EVERY", 4)
    actors = Actors.begin(run).train(4)
    left = left_by(actors, run)
    new = Supervisor(run)
    Learner(run, new.writer.claim)
    RealScheduler(run, new.writer.claim)
    assert [orphan.path for orphan in list_orphans(run, store_clock(run))] == sorted(left)
    for log in (new.log, actors.learner.log):
        log.settle()
    if not segments:
        forget(run)
    run.put(entry_path(committed(run, 1).n), b"{}")
    if segments:
        assert [orphan.path for orphan in list_orphans(run, store_clock(run))] == sorted(left)
    else:
        with pytest.raises(Corrupt, match="garbage cannot be identified, because the run's log is damaged: log/"):
            list_orphans(run, store_clock(run))


def test_garbage_collection_refuses_a_log_with_an_invalid_entry(run: LocalStore) -> None:
    actors = Actors.begin(run).train(2)
    left_by(actors, run)
    new = Supervisor(run)
    learner = Learner(run, new.writer.claim)
    data = run.get(entry_path(learner.writer.claim))
    run.put(entry_path(learner.writer.claim + 1), data.replace(b"learner", b"student"))
    with pytest.raises(Corrupt):
        list_orphans(run, store_clock(run))


@pytest.mark.parametrize("follows", [True, False])
def test_garbage_collection_refuses_a_log_with_a_misplaced_entry(run: LocalStore, follows: bool) -> None:
    """A learner's claim that names its supervisor's claim replaces the previous learner. A claim that names none is
    refused.
    """
    actors = Actors.begin(run).train(2)
    left_by(actors, run)
    state, at = Log(run).state, store_clock(run)
    body = Claimed(under=state.newest_claim("supervisor") if follows else None)
    n, head = state.n + 1, (state.version, state.next_batch)
    run.put(entry_path(n), encode(Entry(n, state.sha256, "late", "learner", n, *head, at, body)).data)
    if follows:
        assert [orphan.path for orphan in list_orphans(run, at)] != []
    else:
        with pytest.raises(Corrupt, match=f"is damaged: {entry_path(n)}"):
            list_orphans(run, at)


class Listed(MemoryStore):
    """A store that calls `after` when the folder `trajectories` has been listed."""

    after: Callable[[], object] = staticmethod(lambda: None)

    # the same signature as the store's
    def list(self, prefix: str = "", after: str = ""):  # type: ignore[no-untyped-def]
        found = list(super().list(prefix, after))
        if prefix == "trajectories":
            type(self).after()
        return iter(found)


def test_object_named_by_a_later_log_entry_is_not_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the objects were listed, the writer appended the entry and lost its role to a newer process."""
    store = MemoryStore(uuid.uuid4().hex)
    actors = Actors.begin(store).train(1)
    entry = actors.scheduler.commit()
    forget(store)
    data = store.get(entry_path(entry.n))
    store.delete(entry_path(entry.n))

    def named() -> None:
        store.put(entry_path(entry.n), data)
        new = Supervisor(store)
        RealScheduler(store, new.writer.claim)

    monkeypatch.setattr(Listed, "after", staticmethod(named))
    watched = Listed(store.name)
    assert list_orphans(watched, store_clock(watched)) == []


def test_garbage_collection_during_takeovers_keeps_live_objects() -> None:
    """At the end, the leftover objects of replaced processes are removed, and all objects that a log entry needs
    exist.
    """
    store, stop, freed = MemoryStore(uuid.uuid4().hex), threading.Event(), list[int]()
    actors = Actors.begin(store)

    def gather() -> None:
        while not stop.is_set():
            freed.append(collect(store, list_orphans(store, store_clock(store))))

    collector = threading.Thread(target=gather)
    collector.start()
    try:
        while (len(freed) < 10 or not any(freed)) and collector.is_alive():
            actors.train(2, prune=False)
            actors.learner.prune()  # the learner dies before it deletes any object
            store.put(f"policies/00009999/{actors.learner.writer.claim}/weights.safetensors", b"left")
            store.put(f"trajectories/00000009-{actors.scheduler.writer.claim}-0a.arrow", b"left")
            under = Supervisor(store)
            claim = under.writer.claim
            actors = Actors(under, RealScheduler(store, claim), Learner(store, claim))
    finally:
        stop.set()
        collector.join()
    assert len(freed) >= 10
    assert audit(store, deep=True).violations == []
    collect(store, list_orphans(store, store_clock(store)))
    assert Log(store).state.releasable == []
    assert set(store.list("policies")) == needed(store)


def test_unfinished_writes_are_garbage_after_a_week(run: LocalStore) -> None:
    Actors.begin(run).train(1)
    scratch = run.root / ".tmp"
    for name, days in (("a", 8), ("b", 6), ("c", 40)):
        (scratch / name).write_bytes(b"half")
        then = store_clock(run) - days * DAY
        os.utime(scratch / name, (then, then))
    found = list_orphans(run, store_clock(run))
    assert [(o.path, o.size, o.why) for o in found] == [
        (".tmp/a", 4, "its writer never finished writing it"),
        (".tmp/c", 4, "its writer never finished writing it"),
    ]
    assert [o.path for o in list_orphans(run, store_clock(run), 30 * DAY)] == [".tmp/c"]
    assert sweep(run) == 8
    assert [path.name for path in scratch.iterdir()] == ["b"]


def test_abandoned_upload_is_removed_and_a_live_one_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(BUCKET) as endpoint:
        use(endpoint, monkeypatch)
        run, other = S3Store(f"{BUCKET}/runs/mine"), S3Store(f"{BUCKET}/runs/mine-too")
        stale, live = begun(run, "stale"), begun(run, "live")
        empty, elsewhere = begun(run, "empty", 0), begun(other, "a")
        grow_old(stale, elsewhere)
        found = list(list_abandoned(run, store_clock(run)))
        assert [(o.path, o.size, o.why) for o in found] == [("stale", PART, "its writer never finished writing it")]
        assert sweep(run) == PART
        assert set(uploads()) == {live, empty, elsewhere}
        ended(run, "live", live)
        assert run.stat("live").size == PART
        assert sweep(run) == 0


@pytest.mark.slow
def test_gc_on_s3_removes_only_stale_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abandoned upload and the leftover objects of a replaced process are removed. An upload in progress
    completes.
    """
    with s3_server(BUCKET) as endpoint:
        use(endpoint, monkeypatch)
        run = S3Store(f"{BUCKET}/runs/mine")
        actors = Actors.begin(run).train(2)  # type: ignore[arg-type]
        stale, live = begun(run, "stale"), begun(run, "live")
        grow_old(stale)
        left = f"policies/00000003/{actors.learner.writer.claim}/weights.safetensors"
        run.put(left, b"left")
        new = Supervisor(run)
        Learner(run, new.writer.claim)
        found = list_orphans(run, store_clock(run))
        assert [orphan.path for orphan in found] == [left, "stale"]
        assert collect(run, found) == PART + 4
        ended(run, "live", live)
        assert audit(run, deep=True).violations == []
        assert audit(run).clean
