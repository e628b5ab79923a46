"""Tests of repeated audits: stored results, what the next audit reads, and progress reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rollflow.storage.audit import checkpoints, objects, recheck
from rollflow.storage.audit.audit import AuditProgress, audit
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import encode, entry_path
from rollflow.storage.log.reading import AT_ONCE
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import StoredObject
from tests.support.audited import WATCHING, Watched, file_of
from tests.support.log_runs import Actors, G, read


class Counted:
    """A store that counts its reads by folder."""

    def __init__(self, watched: Watched) -> None:
        self.name = watched.name
        self.reads: Counter[str] = Counter()

    def __enter__(self) -> Counted:
        WATCHING[self.name] = lambda path: self.reads.update([path.split("/")[0]])
        return self

    def __exit__(self, *of: object) -> None:
        WATCHING[self.name] = lambda path: None


@pytest.mark.parametrize("length", [5, 50])
def test_second_audit_reads_only_new_log_entries(store: MemoryStore, watched: Watched, length: int) -> None:
    """The second audit makes the same number of reads, whether the run has 50 versions or 5."""
    actors = Actors.begin(store).train(length)
    with Counted(watched) as whole:
        first = audit(watched)
    known = len(read(store))
    # the audit makes at most `AT_ONCE` reads beyond the log's end, for any length of the log
    assert whole.reads["log"] <= known + AT_ONCE + 1
    actors.train(2, prune=False)
    new = len(read(store)) - known
    assert new == 4
    with Counted(watched) as second:
        report = audit(watched)
    assert report.clean
    assert (report.since, report.entries) == (known, known + 4)
    again = 2 + recheck.NEWEST  # reads of entries 0 and 1 and of the newest entries
    # the other reads are of the new entries, and of unused numbers after them
    assert second.reads["log"] <= 1 + again + 4 + 8
    assert second.reads["trajectories"] == 2
    assert second.reads["policies"] == 4  # weights and state of two versions
    assert second.reads["audits"] == 1
    assert second.reads.total() - second.reads["log"] - second.reads["audits"] == 6
    assert report.objects == first.objects + 6
    fresh = audit(watched, deep=True)
    assert replace(report, since=0, bytes=0, objects=0) == replace(fresh, bytes=0, objects=0)
    with Counted(watched) as third:
        assert audit(watched) == replace(report, since=known + 4, bytes=0)
    assert third.reads == {"log": third.reads["log"], "audits": 1}
    assert third.reads["log"] <= 1 + again + 3


def test_new_log_entries_must_follow_the_audited_ones(store: MemoryStore) -> None:
    """The new entries form a valid hash chain, but do not follow the entry at which the audit ended."""
    actors = Actors.begin(store).train(1)
    assert audit(store).clean
    n, prev = len(read(store)), "0" * 64
    entries = read(actors.train(2).learner.store)
    for path in list(store.list("log_snapshots")):
        store.delete(path)
    for entry in entries[n:]:
        encoded = encode(replace(entry, prev=prev))
        store.put(entry_path(entry.n), encoded.data)
        prev = encoded.sha256
    report = audit(store)
    assert (report.since, [(v.kind, v.where) for v in report.violations]) == (n, [("altered", entry_path(n - 1))])


def test_batch_not_yet_trained_on_is_counted_by_a_later_audit(store: MemoryStore, watched: Watched) -> None:
    actors = Actors.begin(store)
    actors.ahead(2)
    assert audit(watched).trajectories == 0
    actors.learner.log.follow()
    actors.learner.publish()
    with Counted(watched) as second:
        assert audit(watched).trajectories == 2 * G
    assert second.reads["trajectories"] == 0
    assert audit(watched, deep=True).staleness == {0: 2 * G}


def test_audit_with_violations_stores_no_checkpoint(store: MemoryStore, watched: Watched) -> None:
    Actors.begin(store).train(2)
    path = file_of(store, 1)
    data = store.get(path)
    store.put(path, b"damaged")
    assert not audit(store).clean
    assert list(store.list("audits")) == []
    assert not audit(store).clean
    store.put(path, data)
    assert audit(store).clean
    assert len(list(store.list("audits"))) == 1


def test_audit_with_violations_keeps_earlier_checkpoints(store: MemoryStore) -> None:
    """The violation is in a new entry, so the next audit begins again where the earlier stored audit ended."""
    actors = Actors.begin(store).train(2)
    assert audit(store).clean
    kept, end = list(store.list("audits")), len(read(store))
    actors.train(1)
    store.put(file_of(store, 2), b"damaged")
    for _ in range(2):
        report = audit(store)
        assert (report.clean, report.since, list(store.list("audits"))) == (False, end, kept)


def test_clean_deep_audit_keeps_earlier_audit_checkpoints(store: MemoryStore) -> None:
    actors = Actors.begin(store).train(1)
    assert audit(store).clean
    kept = list(store.list("audits"))
    assert audit(actors.train(1).learner.store, deep=True).clean
    assert list(store.list("audits"))[:-1] == kept


@pytest.mark.parametrize("how", ["cannot be read", "its entry cannot"])
def test_audit_skips_an_invalid_checkpoint(store: MemoryStore, watched: Watched, how: str) -> None:
    actors = Actors.begin(store).train(1)
    assert audit(store).clean
    first = len(read(store))
    assert audit(actors.train(1).learner.store).clean
    [_, newest], end = store.list("audits"), entry_path(len(read(store)) - 1)
    if how == "cannot be read":
        store.put(newest, b"[]")

    def before(path: str) -> None:
        if path == end and how != "cannot be read":
            raise Corrupt(f"{path}: its bytes are not those that were written")

    WATCHING[watched.name] = before
    report = audit(watched)
    wrong = set() if how == "cannot be read" else {("altered", end)}
    assert (report.since, {(v.kind, v.where) for v in report.violations}) == (first, wrong)


def test_deep_audit_reads_every_object_again(store: MemoryStore) -> None:
    Actors.begin(store).train(3)
    assert audit(store).clean
    path = file_of(store, 1)
    data = store.get(path)
    store.put(path, b"damaged")
    assert audit(store).clean
    assert [(v.kind, v.where) for v in audit(store, deep=True).violations] == [("altered", path)]
    # the stored results of audits were removed, so the object is checked again
    assert [(v.kind, v.where) for v in audit(store).violations] == [("altered", path)]
    store.put(path, data)
    assert audit(store).clean


@pytest.mark.parametrize("how", ["altered", "other rules", "other fold", "of another entry"])
def test_invalid_audit_checkpoint_is_ignored(store: MemoryStore, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors.begin(store).train(3)
    if how.startswith("other "):
        monkeypatch.setattr(checkpoints, "RULES" if how == "other rules" else "FOLD", 0)
    assert audit(store).clean
    monkeypatch.undo()
    [path] = store.list("audits")
    if how == "altered":
        store.put(path, store.get(path).replace(b'"run":"test"', b'"run":"tent"'))
    if how == "of another entry":
        store.put(checkpoints.audit_path(3), store.get(path))
        store.delete(path)
    actors.train(1)
    report = audit(store)
    assert (report.clean, report.since, report.run) == (True, 0, "test")


def test_only_the_newest_audit_checkpoints_are_kept(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    for _ in range(checkpoints.KEPT + 2):
        assert audit(actors.train(1).learner.store).clean
    assert len(list(store.list("audits"))) == checkpoints.KEPT


def test_audit_limits_the_bytes_it_reads_at_a_time(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read begins only if all concurrent reads together stay within the limit. An object above the limit is read
    alone.
    """
    monkeypatch.setattr(objects, "MOST_BYTES", 10)
    ended: list[objects.ObjectFinding] = []
    before = []
    with objects.ObjectChecks(store, ended.append) as looking:
        for size in (6, 4, 1, 5, 20, 3):
            stored = StoredObject(f"of-{size}", size, store.put(f"of-{size}", b"x" * size))
            looking.add(objects.NamedObject(stored, 0, "run"))
            before.append(len(ended))
        looking.finish()
    assert before == [0, 0, 1, 1, 4, 5]
    assert [looked.size for looked in ended] == [6, 4, 1, 5, 20, 3]


def test_audit_checks_a_limited_number_of_objects_at_a_time(store: MemoryStore) -> None:
    ended: list[objects.ObjectFinding] = []
    before = []
    stored = StoredObject("one", 1, store.put("one", b"1"))
    with objects.ObjectChecks(store, ended.append) as looking:
        for _ in range(40):
            looking.add(objects.NamedObject(stored, 0, "run"))
            before.append(len(ended))
        looking.finish()
    assert before == [0] * 32 + list(range(1, 9))
    assert len(ended) == 40


def test_audit_progress_ends_at_the_reported_totals(run: MemoryStore) -> None:
    told: list[AuditProgress] = []
    report = audit(run, deep=True, progress=told.append)
    assert told[-1] == AuditProgress(report.entries, report.entries, report.objects, report.objects, report.bytes)
    assert [one.entries for one in told] == sorted(one.entries for one in told)
    assert [one.bytes for one in told] == sorted(one.bytes for one in told)
    assert report.bytes == sum(
        run.stat(path).size for path in run.list() if path.startswith(("policies", "trajectories"))
    )
