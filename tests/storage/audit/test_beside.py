"""Tests that an audit during a run reports no false violations."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import Corrupt, Missing, Unreachable
from rollflow.storage.log.entries import BatchVoided, Entry, Pruned, encode, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.memory import MemoryStore
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.audited import WATCHING, Watched, file_of, weights_of
from tests.support.log_actors import Supervisor
from tests.support.log_runs import Actors, G, RealScheduler, committed, create, forget, of_kind, published, read
from tests.support.pipeline import Damage, Pipeline


def test_newly_created_run_passes_the_audit(store: MemoryStore) -> None:
    create(store)
    report = audit(store)
    assert (report.violations, report.versions, report.entries) == ([], 0, 1)


def test_unfinished_run_passes_the_audit(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    assert audit(store).violations == []
    actors.ahead(2)
    actors.scheduler.dispatch(0)
    assert audit(store).violations == []
    actors.train(1)
    report = audit(store)
    assert report.violations == []
    assert (report.versions, report.fates) == (1, {"trained": 2, "committed, waiting": 4})


def test_batch_formed_again_after_a_void_passes_the_audit(store: MemoryStore) -> None:
    actors = Actors.begin(store).train(2)
    actors.ahead()
    path = file_of(store, 2)
    store.put(path, b"damaged")
    assert {("altered", path)} == {(v.kind, v.where) for v in audit(store).violations}
    actors.learner.log.follow()
    actors.learner.void(2)
    report = audit(store)
    assert (report.violations, report.fates["discarded: corrupt"]) == ([], 2)
    assert report.quarantined == [f"{entry_path(committed(store, 2).n)}: damaged"]
    actors.scheduler.log.follow()
    actors.scheduler.begin()
    actors.train(1)
    assert audit(store).violations == []
    report = audit(store, deep=True)
    assert (report.violations, report.fates) == ([], {"trained": 6, "discarded: corrupt": 2})


@pytest.mark.parametrize(("damage", "corrupt"), [({(2, 0): "cut", (2, 1): "gone"}, 8), ({(0, 0): "flipped"}, 4)])
def test_quarantined_batch_is_listed_but_is_not_a_violation(
    store: MemoryStore, damage: dict[tuple[int, int], Damage], corrupt: int
) -> None:
    run_virtual(Pipeline(store, async_ratio=2.0, damage=damage).run())
    report = audit(store, deep=True)
    assert report.violations == []
    voids = [entry.body for entry in of_kind(store, BatchVoided)]
    assert [body.number for body in voids if isinstance(body, BatchVoided)] == [number for number, _ in damage]
    named = [entry_path(body.entry) for body in voids if isinstance(body, BatchVoided)]
    assert [line.split(":")[0] for line in report.quarantined] == named
    assert report.fates["discarded: corrupt"] == corrupt
    assert report.fates["trained"] == 6 * 4


def test_leftover_files_of_replaced_processes_are_no_violation(store: MemoryStore) -> None:
    actors = Actors.begin(store).train(2)
    store.put(f"policies/00000003/{actors.learner.writer.claim}/weights.safetensors", b"half")
    Supervisor(store)
    store.put(f"trajectories/00000002-{actors.scheduler.writer.claim}-ab.arrow", b"lost")
    again = RealScheduler(store, Log(store).state.newest_claim("supervisor"))
    again.commit()
    assert audit(store).violations == []


def test_deletion_of_old_versions_during_an_audit_is_valid(store: MemoryStore, watched: Watched) -> None:
    """An object that was needed when the audit read the log is pruned before the audit reads the object."""
    actors = Actors.begin(store).train(3)
    gone = weights_of(store, 2)

    def before(path: str) -> None:
        if path == gone and store.exists(gone):
            WATCHING[watched.name] = lambda path: None
            actors.train(4)
            assert not store.exists(gone)

    WATCHING[watched.name] = before
    assert Log(store).state.retention.is_needed("weights", 2, 3)
    report = audit(watched)
    assert (report.violations, report.versions) == ([], 3)
    report = audit(watched)
    assert (report.violations, report.versions) == ([], 7)
    store.delete(weights_of(store, 6))  # an object that no entry has pruned
    assert {(v.kind, v.where) for v in audit(watched, deep=True).violations} == {("missing", weights_of(store, 6))}


def test_batch_voided_during_an_audit_is_not_a_violation(store: MemoryStore, watched: Watched) -> None:
    actors = Actors.begin(store).train(2)
    actors.ahead()
    path = file_of(store, 2)
    store.put(path, b"damaged")

    def before(found: str) -> None:
        if found == path:
            WATCHING[watched.name] = lambda path: None
            actors.learner.log.follow()
            actors.learner.void(2)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.entries) == ([], committed(store, 2).n + 1)
    assert audit(watched).violations == []


def appended(store: MemoryStore, entry: Entry) -> None:
    """Append one more log entry without checking it by the log's rules."""
    entries = read(store)
    state = Log(store).state
    one = replace(entry, n=len(entries), prev=state.sha256, version=state.version, batch=state.next_batch)
    store.put(entry_path(one.n), encode(one).data)


@pytest.mark.parametrize("of", ["batch", "weights"])
def test_invalid_log_entry_during_an_audit_hides_no_violation(store: MemoryStore, watched: Watched, of: str) -> None:
    """The refused entry voids a batch that was trained on, or prunes an object that is needed."""
    Actors.begin(store).train(2)
    last, batch = published(store, 2), committed(store, 1).n
    path = file_of(store, 1) if of == "batch" else weights_of(store, 2)
    store.put(path, b"damaged")

    def before(found: str) -> None:
        if found == path:
            WATCHING[watched.name] = lambda path: None
            body = BatchVoided(1, batch, "late") if of == "batch" else Pruned(((2, "weights"),))
            appended(store, replace(last, body=body))

    WATCHING[watched.name] = before
    assert {(v.kind, v.where) for v in audit(watched).violations} == {("altered", path)}


def test_voided_batch_is_not_reported_after_a_lost_log_entry(store: MemoryStore, watched: Watched) -> None:
    """After a lost log entry, the run's state in the audit does not contain the voided batch, but the batch still
    counts as voided.
    """
    actors = Actors.begin(store).train(2)
    actors.ahead()
    actors.learner.log.follow()
    forget(store)
    gap, path = entry_path(committed(store, 0).n), file_of(store, 2)
    store.put(path, b"damaged")
    store.delete(gap)

    def before(found: str) -> None:
        if found == path:
            WATCHING[watched.name] = lambda path: None
            actors.learner.void(2)

    WATCHING[watched.name] = before
    assert {(v.kind, v.where) for v in audit(watched).violations} == {("gap", gap)}


def test_audit_does_not_count_a_voided_batch(store: MemoryStore) -> None:
    """The batch was unreadable when it was voided."""
    actors = Actors.begin(store).train(2)
    actors.ahead()
    actors.learner.log.follow()
    actors.learner.void(2)
    report = audit(store)
    assert (report.violations, report.trajectories) == ([], 2 * 2 * G)
    assert report.staleness.total() == report.trajectories


def test_object_restored_during_an_audit_is_not_a_violation(store: MemoryStore, watched: Watched) -> None:
    """Bytes with the committed hash are restored, so the batch is accepted when it is checked again."""
    Actors.begin(store).train(2)
    path = file_of(store, 1)
    data, reads = store.get(path), 0
    store.delete(path)

    def before(found: str) -> None:
        nonlocal reads
        if found == path:
            reads += 1
            if reads == 2:
                store.put(path, data)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.trajectories) == ([], 2 * 2 * G)


def test_log_entry_written_during_an_audit_is_not_a_gap(store: MemoryStore, watched: Watched) -> None:
    """The log entry is missing at its first read although the next entry exists, so the audit reads the entry again."""
    Actors.begin(store).train(4)
    forget(store)
    missed: list[str] = []

    def before(path: str) -> None:
        if path == entry_path(7) and not missed:
            missed.append(path)
            raise Missing(path)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.versions, len(missed)) == ([], 4, 1)


@pytest.mark.parametrize("what", ["weights", "entry"])
def test_unreachable_object_is_not_a_violation(store: MemoryStore, watched: Watched, what: str) -> None:
    Actors.begin(store).train(2)
    path = entry_path(5) if what == "entry" else weights_of(store, 2)

    def before(found: str) -> None:
        if found == path:
            raise Unreachable(path)

    WATCHING[watched.name] = before
    with pytest.raises(Unreachable):
        audit(watched)
    assert list(store.list("audits")) == []


@pytest.mark.parametrize("what", ["weights", "entry", "batch"])
def test_object_with_repeated_wrong_reads_is_reported_as_altered(
    store: MemoryStore, watched: Watched, what: str
) -> None:
    Actors.begin(store).train(2)
    path = {"entry": entry_path(5), "weights": weights_of(store, 2), "batch": file_of(store, 1)}[what]

    def before(found: str) -> None:
        if found == path:
            raise Corrupt(f"{path}: its bytes are not those that were written")

    WATCHING[watched.name] = before
    [violation] = audit(watched).violations
    assert (violation.kind, violation.where) == ("altered", path)
    assert "its bytes are not those that were written" in violation.what


@pytest.mark.long
def test_audits_of_a_running_run_find_no_violation(store: MemoryStore) -> None:
    actors, stop = Actors.begin(store), threading.Event()
    reports: list[AuditReport] = []

    def look() -> None:
        while not stop.is_set():
            reports.append(audit(store, deep=len(reports) % 2 == 0))

    auditor = threading.Thread(target=look)
    auditor.start()
    try:
        while len(reports) < 12 and auditor.is_alive():
            actors.train(3)
    finally:
        stop.set()
        auditor.join()
    assert len(reports) >= 12
    assert [report.violations for report in reports if not report.clean] == []
    assert len({report.versions for report in reports}) > 2
