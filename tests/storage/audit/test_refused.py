"""Tests that an audit reports each log entry that the log's rules refuse, by kind and path, and still checks everything
else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.tolerant_fold import MOST
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, RunCreated, VersionPublished, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, StoredObject
from tests.support.audited import VERSIONS, file_of, found, lagging, of_first, other_alpha, weights_of
from tests.support.log_actors import Scheduler
from tests.support.log_runs import (
    Actors,
    changed,
    committed,
    forget,
    inserted,
    published,
    read,
    rebatched,
    rewritten,
    sha256_of,
)


def test_audit_finds_an_inserted_batch_of_finished_prompts(run: MemoryStore) -> None:
    again = committed(run, VERSIONS)
    assert isinstance(again.body, BatchCommitted)
    at = len(read(run))
    state = Log(run).state
    body = replace(again.body, number=state.next_batch, issued=())
    inserted(run, at, replace(again, body=body, version=state.version, batch=state.next_batch + 1))
    assert ("duplicate", entry_path(at)) in found(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: {"groups": body.groups[:1] * 2},
        lambda body: {"issued": (*body.issued, 0)},
        lambda body: {"discards": (Discard(body.groups[0].key, DiscardReason.STALE, 0, 5),)},
    ],
    ids=["a group twice", "a prompt issued twice", "trained on and discarded"],
)
def test_audit_finds_a_prompt_with_two_outcomes(
    run: MemoryStore, change: Callable[[BatchCommitted], dict[str, object]]
) -> None:
    entry = committed(run, VERSIONS)
    changed(run, entry.n, lambda body: replace(body, **change(body)))
    assert {(kind, where) for kind, where in found(run) if where.startswith("log/")} == {
        ("duplicate", entry_path(entry.n))
    }


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, {"started": -1}),
        (3, {"started": -1}),
        (3, {"newest": 0}),  # the newest version is older than the group's start
        (3, {"started": 4, "newest": 4}),
    ],
)
def test_audit_continues_after_a_batch_of_future_versions(run: MemoryStore, number: int, said: dict[str, int]) -> None:
    """The log entry of the batch and the batch file (with other versions) are reported, but no later entry is."""
    n, whole = committed(run, number).n, audit(run)
    changed(run, n, lambda body: replace(body, groups=(body.groups[0], body.groups[1]._replace(**said))))
    assert found(run) == {("stale", entry_path(n)), ("lineage", file_of(run, number))}
    assert audit(run).fates == whole.fates


def test_batch_with_a_wrong_count_is_not_reported_as_stale(run: MemoryStore) -> None:
    """The groups of the batch started and ended under version 0, which was the newest version at that time."""
    n = committed(run, 0).n
    changed(run, n, lambda body: replace(body, rows=body.rows + 1))
    assert audit(run).violations[0].kind == "lineage"
    assert {kind for kind, where in found(run) if where == entry_path(n)} == {"lineage"}


def test_audit_finds_a_batch_that_was_committed_twice(run: MemoryStore) -> None:
    """The batch number exists already, although all dispatches are new."""
    last, at, state = committed(run, VERSIONS), len(read(run)), Log(run).state
    assert isinstance(last.body, BatchCommitted)
    prompts = [state.cursor.upcoming[0], state.cursor.upcoming[1]]
    groups = tuple(group._replace(prompt=prompt) for group, prompt in zip(last.body.groups, prompts, strict=True))
    inserted(run, at, replace(last, body=replace(last.body, groups=groups, issued=tuple(prompts), discards=())))
    assert ("duplicate", entry_path(at)) in found(run)


def test_new_batch_after_a_void_is_not_reported_as_duplicate(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    actors.ahead(2)
    actors.learner.log.follow()
    actors.learner.void(0)
    actors.scheduler.log.follow()
    actors.scheduler.begin()
    actors.ahead()
    n = committed(store, 0).n
    assert found(store) == set()
    changed(store, n, lambda body: replace(body, rows=body.rows + 1))
    assert found(store) == {("lineage", entry_path(n))}


def test_audit_finds_an_attempt_that_was_trained_on_twice(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    actors.scheduler.dispatch(0)
    actors.scheduler.discard(0, DiscardReason.FAILED)
    actors.train(1)
    forget(store)
    entry, at = committed(store, 0), len(read(store))
    assert isinstance(entry.body, BatchCommitted)
    [again] = [group for group in entry.body.groups if group.attempt == 1]
    body = replace(entry.body, number=1, groups=(again, again._replace(prompt=90)), issued=(), discards=())
    inserted(store, at, replace(entry, body=body, version=1, batch=2))
    assert ("duplicate", entry_path(at)) in found(store)


def test_audit_finds_a_batch_inserted_in_the_middle_of_the_log(run: MemoryStore) -> None:
    """The log entry of a batch is inserted a second time, so its batch number exists already. Later entries are still
    applied.
    """
    again = committed(run, 2)
    inserted(run, again.n + 1, again)
    assert found(run) == {("duplicate", entry_path(again.n + 1))}


def test_audit_finds_an_inserted_batch_with_a_skipped_number(run: MemoryStore) -> None:
    state, last = Log(run).state, committed(run, VERSIONS)
    assert isinstance(last.body, BatchCommitted)
    keys = [group._replace(prompt=state.cursor.upcoming[0] + 2) for group in last.body.groups[:1] * 2]
    body = replace(last.body, number=state.next_batch, groups=tuple(keys), issued=(keys[0].prompt,))
    skipping = replace(last, body=body, version=state.version, batch=state.next_batch + 1)
    at = len(read(run))
    inserted(run, at, replace(skipping, body=replace(body, groups=(keys[0], keys[1]._replace(attempt=1)))))
    assert ("missing", entry_path(at)) in found(run)
    rewritten(run, read(run)[:at])
    inserted(run, at, replace(skipping, body=replace(body, number=state.next_batch + 1)))
    assert ("gap", entry_path(at)) in found(run)


def test_audit_names_only_the_first_invalid_log_entries(run: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without version 1 no later version can follow."""
    monkeypatch.setattr("rollflow.storage.audit.tolerant_fold.MOST", 3)
    n = published(run, 1).n
    rewritten(run, [one for one in read(run) if one.n != n])
    violations = audit(run).violations
    named = [
        violation for violation in violations if violation.what.startswith("the entry is refused by the log's rules")
    ]
    [last] = [violation for violation in violations if "entries are refused, of which 3 are listed" in violation.what]
    assert [violation.kind for violation in named] == [
        "stale",
        "gap",
        "stale",
        "gap",
    ]  # the first refused entry is named, too
    assert (last.kind, last.where) == ("lineage", entry_path(len(read(run)) - 1))
    count = int(last.what.split()[0])
    monkeypatch.setattr("rollflow.storage.audit.tolerant_fold.MOST", count)
    refused = [violation.what for violation in audit(run).violations if "entries are refused" in violation.what]
    assert (count > 3, refused) == (True, [])  # all refused entries are named
    elsewhere = {(violation.kind, violation.where) for violation in violations if violation.where[:4] != "log/"}
    # the entry is also stale, and pruned objects are not reported as missing
    assert elsewhere == {("stale", file_of(run, 2))}


def test_deleted_object_after_an_invalid_entry_is_not_missing(store: MemoryStore) -> None:
    """Without version 1 all later versions are refused, so the entry that prunes an object is also refused."""
    Actors.begin(store).train(9)
    n = published(store, 1).n
    rewritten(store, [one for one in read(store) if one.n != n])
    violations = found(store)
    assert violations
    assert [where for kind, where in violations if kind == "missing"] == []


def test_audit_names_each_batch_with_too_old_responses(store: MemoryStore) -> None:
    """After a batch that is too old, later log entries are still applied."""
    lagging(store)
    changed(store, 0, lambda body: other_alpha(body, 0.5))
    stale = {where for kind, where in found(store) if (kind, where[:4]) == ("stale", "log/")}
    assert stale == {entry_path(committed(store, number).n) for number in range(1, VERSIONS + 1)}
    assert len(stale) > MOST


def test_audit_finds_an_inserted_version(run: MemoryStore) -> None:
    entry, at = published(run, VERSIONS), published(run, VERSIONS).n + 1
    inserted(run, at, replace(entry, version=VERSIONS + 1, body=replace(entry.body, number=VERSIONS + 1)))  # type: ignore[arg-type]
    assert found(run) == {("lineage", entry_path(at))}
    rewritten(run, [one for one in read(run) if one.n != at])
    waits, whole = committed(run, VERSIONS).n, audit(run)
    skipping = replace(entry.body, number=VERSIONS + 2, batch_entry=waits)  # type: ignore[arg-type]
    inserted(run, at, replace(entry, body=skipping))
    assert found(run) == {("gap", entry_path(at))}
    assert audit(run).trajectories == whole.trajectories  # the named batch still waits


def test_second_entry_of_a_version_does_not_replace_the_first(run: MemoryStore) -> None:
    """The weights of the valid version are missing. A second log entry for the same version names weights that
    exist.
    """
    entry, lost, there = published(run, VERSIONS), weights_of(run, VERSIONS), weights_of(run, VERSIONS - 1)
    inserted(run, entry.n + 1, replace(entry, body=replace(entry.body, weights=(stored(run, there),))))  # type: ignore[arg-type]
    assert found(run) == {("lineage", entry_path(entry.n + 1))}
    run.delete(lost)
    assert found(run) == {("lineage", entry_path(entry.n + 1)), ("missing", lost)}


def stored(run: ObjectStore, path: str) -> StoredObject:
    """Return an existing object as an entry names it."""
    data = run.get(path)
    return StoredObject(path, len(data), hashlib.sha256(data).hexdigest())


def test_audit_finds_an_inserted_void_of_a_trained_batch(run: MemoryStore) -> None:
    """The inserted entry that voids the batch is refused, so faults of the batch are still reported, and the batch is
    still counted.
    """
    entry, path = committed(run, 2), file_of(run, 2)
    whole, at = audit(run), published(run, 3).n + 1
    body = BatchVoided(2, entry.n, "never")
    inserted(run, at, replace(entry, body=body, version=3, batch=4))
    assert found(run) == {("lineage", entry_path(at))}
    report = audit(run)
    assert (report.trajectories, report.quarantined) == (whole.trajectories, [])
    run.put(path, b"damaged")
    assert found(run) == {("lineage", entry_path(at)), ("altered", path)}


@pytest.mark.parametrize("head", [{"version": 99}, {"version": 0}, {"batch": 99}])
def test_wrong_version_number_in_a_log_entry_is_one_violation(run: MemoryStore, head: dict[str, int]) -> None:
    """If an entry names a newest version that does not exist, the same objects are still needed."""
    entries, lost, damaged = read(run), weights_of(run, VERSIONS), file_of(run, 5)
    run.delete(lost)
    run.put(damaged, b"damaged")
    rewritten(run, entries)
    fair = audit(run)
    for n in range(1, len(entries)):
        if getattr(entries[n], *head) != head[next(iter(head))]:
            rewritten(run, [*entries[:n], replace(entries[n], **head), *entries[n + 1 :]])
            assert found(run) == {("lineage", entry_path(n)), ("missing", lost), ("altered", damaged)}
            assert replace(audit(run), violations=[]) == replace(fair, violations=[])


def test_invalid_log_entry_does_not_set_the_newest_version(run: MemoryStore) -> None:
    """The batch file of the entry is compared with the version that was the newest when the batch was committed."""
    entry, lost = committed(run, 2), weights_of(run, VERSIONS)
    at = entry.n + 1
    inserted(run, at, replace(entry, version=99))  # the refused entry, with a wrong version
    run.delete(lost)
    assert found(run) == {("duplicate", entry_path(at)), ("missing", lost)}


def test_objects_of_an_invalid_version_entry_are_checked(run: MemoryStore) -> None:
    entry, at = published(run, VERSIONS), published(run, VERSIONS).n + 1
    assert isinstance(entry.body, VersionPublished)
    gone = replace(entry.body.weights[0], path="policies/00000007/3/gone.safetensors")
    inserted(run, at, replace(entry, body=replace(entry.body, number=VERSIONS + 1, weights=(gone,))))
    assert found(run) == {("lineage", entry_path(at)), ("missing", gone.path)}


def test_audit_finds_a_log_entry_of_a_replaced_process(run: MemoryStore) -> None:
    """The entry is intact and part of the hash chain, but a newer process has claimed its writer's role."""
    Scheduler(run, Log(run).state.newest_claim("supervisor"))
    forget(run)
    last, at = committed(run, VERSIONS), len(read(run))
    inserted(run, at, replace(last, body=BatchVoided(VERSIONS, last.n, "late"), version=VERSIONS))
    assert found(run) == {("lineage", entry_path(at))}


def test_audit_ignores_a_second_creation_of_the_run(run: MemoryStore) -> None:
    """If the second creation of the run were applied, its config would allow a sample that was not requested."""
    path = rebatched(run, 3, lambda groups: [of_first(groups[0], sample=4), groups[1]])
    first = read(run)[0]
    assert isinstance(first.body, RunCreated)
    config = {**first.body.config, "rollout": {"redundant_responses": 1}}
    inserted(run, 1, replace(first, body=replace(first.body, config=config, config_sha256=sha256_of(config))))
    assert found(run) == {("lineage", entry_path(1)), ("altered", path)}


def test_audit_finds_an_empty_batch(run: MemoryStore) -> None:
    """The log entry and the batch file agree, but the log's rules refuse a batch without groups."""
    entry = committed(run, VERSIONS)
    path = file_of(run, VERSIONS)
    data = TrajectoryBatch.from_groups([]).to_bytes().to_pybytes()
    file = StoredObject(path, len(data), run.put(path, data))
    changed(run, entry.n, lambda body: replace(body, file=file, groups=(), rows=0))
    assert found(run) == {("lineage", entry_path(entry.n))}


def test_version_claimed_after_an_invalid_entry_is_not_used(run: MemoryStore) -> None:
    """If the audit believed the entry's newest version 10**6, the weights of no other version would be needed."""
    entry, lost = committed(run, 2), weights_of(run, VERSIONS)
    at = entry.n + 1
    inserted(run, at, entry)
    inserted(run, at + 1, replace(entry, version=10**6))
    run.delete(lost)
    assert ("missing", lost) in found(run)
