"""Each fault in the log's entries is named, by kind and path, and what follows is judged as far as it can be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.audit import audit
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, entry_path
from rollflow.storage.log.log import Log
from rollflow.storage.log.refold import MOST
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, StoredObject
from tests.support.audited import VERSIONS, file_of, found, lagging, other_alpha, weights_of
from tests.support.log_actors import Scheduler
from tests.support.log_runs import Actors, changed, committed, forget, inserted, published, read, resealed, rewritten


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("how", ["missing", "altered", "cut"])
def test_a_damaged_entry(store: MemoryStore, how: str, segments: bool) -> None:
    """It is named; with its segment the rest is judged as ever, without it, as far as that goes."""
    Actors.begin(store).train(VERSIONS)
    if not segments:
        forget(store)
    n = committed(store, 2).n
    path, data = entry_path(n), store.get(entry_path(n))
    store.put(path, data[:-9] if how == "cut" else data[:40] + bytes([data[40] ^ 1]) + data[41:])
    if how == "missing":
        store.delete(path)
    lost = file_of_last(store)
    store.put(lost, b"something else")
    kind = "gap" if how == "missing" else "altered"
    assert found(store) == {(kind, path), ("altered", lost)}
    assert audit(store).versions == (VERSIONS if segments else 2)


def file_of_last(run: ObjectStore) -> str:
    return max(path for path in run.list("trajectories"))


def test_several_missing_entries_are_read_from_their_segments(store: MemoryStore) -> None:
    lagging(store)
    for n in (6, 7, 8, 9):
        store.delete(entry_path(n))
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == VERSIONS
    store.put("log_segments/0000000004.jsonl", b"cut")
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == 0


def test_two_missing_entries_are_both_named(run: MemoryStore) -> None:
    run.delete(entry_path(5))
    run.delete(entry_path(6))
    what = "log/0000000005.json to log/0000000006.json missing, log/0000000007.json is there"
    assert [violation.what for violation in audit(run).violations] == [what]


def test_several_missing_entries_are_one_gap(run: MemoryStore) -> None:
    for n in (5, 6, 7):
        run.delete(entry_path(n))
    assert found(run) == {("gap", entry_path(5))}
    what = "log/0000000005.json to log/0000000007.json missing, log/0000000008.json is there"
    assert audit(run).violations[0].what == what


@pytest.mark.parametrize(("end", "plain"), [(9, True), (10, False)])
def test_a_long_hole_on_a_folder_is_found_by_a_deep_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int, plain: bool
) -> None:
    """A short one by any: three numbers behind a free one are looked at."""
    monkeypatch.setattr("rollflow.storage.log.reading.AHEAD", 4)
    store = LocalStore(tmp_path)
    Actors.begin(store).train(VERSIONS)
    forget(store)
    for n in range(6, end):
        store.delete(entry_path(n))
    assert [(v.kind, v.where) for v in audit(store, deep=True).violations] == [("gap", entry_path(6))]
    assert audit(store).clean is not plain


@pytest.mark.parametrize("name", ["99", "notes", "0000000099.json~", "²", "00000000099"])
def test_what_is_no_entry_by_its_name_is_none(run: MemoryStore, name: str) -> None:
    run.put(f"log/{name}.json", b"?")
    assert found(run) == set()
    assert Log(run).state.version == VERSIONS


def test_an_entry_altered_and_resealed(run: MemoryStore) -> None:
    n = committed(run, 2).n
    resealed(run, n, at=0.0)
    assert found(run) == {("altered", entry_path(n))}


def test_a_newest_entry_that_follows_another_one(run: MemoryStore) -> None:
    n = len(read(run)) - 1
    resealed(run, n, prev="0" * 64)
    assert found(run) == {("altered", entry_path(n))}


def test_an_entry_altered_with_what_it_follows(run: MemoryStore) -> None:
    resealed(run, 6, prev="0" * 64)
    assert found(run) == {("altered", entry_path(6))}


def test_swapped_entries(run: MemoryStore) -> None:
    fifth, sixth = run.get(entry_path(5)), run.get(entry_path(6))
    run.put(entry_path(5), sixth)
    run.put(entry_path(6), fifth)
    assert found(run) == {("altered", entry_path(5)), ("altered", entry_path(6))}


def test_swapped_and_resealed_entries(run: MemoryStore) -> None:
    entries = read(run)
    for n, other in ((5, 6), (6, 5)):
        resealed(run, n, **{name: getattr(entries[other], name) for name in ("id", "role", "claim", "body")})
    assert found(run) >= {("gap", entry_path(5)), ("altered", entry_path(6))}  # batch 1 before batch 0


def test_swapped_entries_in_a_new_chain(run: MemoryStore) -> None:
    """A version before the batch that it was trained on."""
    entries = read(run)
    n = committed(run, 2).n
    after = published(run, 3).n
    entries[n], entries[after] = entries[after], entries[n]
    rewritten(run, entries)
    assert ("gap", entry_path(n)) in found(run)


def test_an_inserted_commit_of_groups_that_have_their_fates(run: MemoryStore) -> None:
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
def test_a_commit_that_gives_a_dispatch_two_fates(
    run: MemoryStore, change: Callable[[BatchCommitted], dict[str, object]]
) -> None:
    entry = committed(run, VERSIONS)
    changed(run, entry.n, lambda body: replace(body, **change(body)))
    assert {(kind, where) for kind, where in found(run) if where.startswith("log/")} == {
        ("duplicate", entry_path(entry.n))
    }


def test_an_inserted_commit_in_the_middle(run: MemoryStore) -> None:
    """The very same commit once more: its number is taken. What follows folds as ever."""
    again = committed(run, 2)
    inserted(run, again.n + 1, again)
    assert found(run) == {("duplicate", entry_path(again.n + 1))}


def test_an_inserted_commit_that_skips_a_prompt_or_a_number(run: MemoryStore) -> None:
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


def test_of_entries_that_are_refused_behind_another_one_the_first_few_are_named(
    run: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without version 1 there is none that can follow."""
    monkeypatch.setattr("rollflow.storage.log.refold.MOST", 3)
    n = published(run, 1).n
    rewritten(run, [one for one in read(run) if one.n != n])
    violations = audit(run).violations
    named = [violation for violation in violations if violation.what.startswith("it cannot stand where it stands")]
    [last] = [violation for violation in violations if "refused entries, of which 3 are named" in violation.what]
    assert [violation.kind for violation in named] == [
        "stale",
        "gap",
        "stale",
        "gap",
    ]  # the first one is not passed over
    assert (last.kind, last.where) == ("lineage", entry_path(len(read(run)) - 1))
    elsewhere = {(violation.kind, violation.where) for violation in violations if violation.where[:4] != "log/"}
    assert elsewhere == {("stale", file_of(run, 2))}  # as its entry is; and what was pruned is not missed


def test_each_commit_that_is_too_old_is_named(store: MemoryStore) -> None:
    """They stop nothing that follows."""
    lagging(store)
    changed(store, 0, lambda body: other_alpha(body, 0.5))
    stale = {where for kind, where in found(store) if (kind, where[:4]) == ("stale", "log/")}
    assert stale == {entry_path(committed(store, number).n) for number in range(1, VERSIONS + 1)}
    assert len(stale) > MOST


def test_an_inserted_version(run: MemoryStore) -> None:
    entry, at = published(run, VERSIONS), published(run, VERSIONS).n + 1
    inserted(run, at, replace(entry, version=VERSIONS + 1, body=replace(entry.body, number=VERSIONS + 1)))  # type: ignore[arg-type]
    assert found(run) == {("lineage", entry_path(at))}
    rewritten(run, [one for one in read(run) if one.n != at])
    inserted(run, at, replace(entry, body=replace(entry.body, number=VERSIONS + 2)))  # type: ignore[arg-type]
    assert ("gap", entry_path(at)) in found(run)


def test_a_version_that_is_published_again_stands_for_no_other_one(run: MemoryStore) -> None:
    """The weights of the one that counts are gone; another entry names some that are there."""
    entry, lost, there = published(run, VERSIONS), weights_of(run, VERSIONS), weights_of(run, VERSIONS - 1)
    inserted(run, entry.n + 1, replace(entry, body=replace(entry.body, weights=(stored(run, there),))))  # type: ignore[arg-type]
    assert found(run) == {("lineage", entry_path(entry.n + 1))}
    run.delete(lost)
    assert found(run) == {("lineage", entry_path(entry.n + 1)), ("missing", lost)}


def stored(run: ObjectStore, path: str) -> StoredObject:
    """What is there, as an entry names it."""
    data = run.get(path)
    return StoredObject(path, len(data), hashlib.sha256(data).hexdigest())


def test_an_inserted_void_of_a_batch_that_was_trained_on(run: MemoryStore) -> None:
    """It excuses nothing of the batch, which is counted as ever."""
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
def test_whatever_entry_says_another_head_all_else_is_judged_as_ever(run: MemoryStore, head: dict[str, int]) -> None:
    """What is needed, too: a version that is not there makes none superfluous."""
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


def test_a_role_that_was_deposed_goes_on(run: MemoryStore) -> None:
    """Whole, chained, and by a claim that holds no more."""
    Scheduler(run, Log(run).state.newest_claim("supervisor"))
    forget(run)
    last, at = committed(run, VERSIONS), len(read(run))
    inserted(run, at, replace(last, body=BatchVoided(VERSIONS, last.n, "late"), version=VERSIONS))
    assert found(run) == {("lineage", entry_path(at))}


def test_a_first_entry_that_is_lost_says_nothing_of_the_run(run: MemoryStore) -> None:
    data = run.get(entry_path(0))
    run.put(entry_path(0), data[:-9])
    with pytest.raises(Corrupt, match=r"log/0000000000.json is not an entry"):
        audit(run)
    run.delete(entry_path(0))
    with pytest.raises(Corrupt, match=r"log/0000000000.json missing"):
        audit(run)
    run.put(entry_path(0), data)
    changed(run, 0, lambda body: replace(body, config={}))
    with pytest.raises(Corrupt, match="cannot stand where it stands"):
        audit(run)


@pytest.mark.parametrize(("how", "kind"), [("gone", "missing"), ("altered", "altered")])
def test_an_index_object(store: MemoryStore, how: str, kind: str) -> None:
    actors = Actors.begin(store)
    for _ in range(12_000):
        actors.scheduler.dispatch(0)
    for _ in range(11_998):
        actors.scheduler.discard(2, DiscardReason.FAILED)
    actors.train(1)
    forget(store)
    assert found(store) == set()
    forget(store)
    [index] = store.list("log_index")
    path = entry_path(committed(store, 0).n)
    store.put(index, b"{}")
    if how == "gone":
        store.delete(index)
    assert found(store) == {(kind, path)}


def test_behind_a_lost_entry_it_is_still_known_what_retention_needs(run: MemoryStore) -> None:
    gap, newest = entry_path(published(run, 1).n), weights_of(run, VERSIONS)
    run.delete(gap)
    run.delete(newest)
    assert found(run) == {("gap", gap), ("missing", newest)}


def test_an_empty_batch(run: MemoryStore) -> None:
    """Its entry and its file agree; the fold refuses it."""
    entry = committed(run, VERSIONS)
    path = file_of(run, VERSIONS)
    data = TrajectoryBatch.from_groups([]).to_bytes().to_pybytes()
    file = StoredObject(path, len(data), run.put(path, data))
    changed(run, entry.n, lambda body: replace(body, file=file, groups=(), rows=0))
    assert found(run) == {("lineage", entry_path(entry.n))}


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_whatever_object_is_damaged_is_named(run: MemoryStore, how: str) -> None:
    """But for the newest entry, when it is gone, and nobody else has seen it."""
    newest = len(read(run)) - 1
    for path in list(run.list()):
        data = run.get(path)
        if how == "gone":
            run.delete(path)
        else:
            run.put(path, data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
        if path == entry_path(0):
            with pytest.raises(Corrupt, match=path):
                audit(run, deep=True)
        else:
            kind = "altered" if how == "flipped" else "gap" if path.startswith("log/") else "missing"
            unseen = (how, path) == ("gone", entry_path(newest))
            assert {(v.kind, v.where) for v in audit(run, deep=True).violations} == (
                set() if unseen else {(kind, path)}
            )
        run.put(path, data)
        forget(run)
