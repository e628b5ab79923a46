"""Tests that an audit reports each fault of a log entry by kind and path, and still checks later entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import Corrupt
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import Pruned, RunCreated, encode, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason
from tests.support.audited import VERSIONS, found, lagging, weights_of
from tests.support.log_runs import (
    Actors,
    changed,
    committed,
    forget,
    of_kind,
    published,
    read,
    resealed,
    rewritten,
    sha256_of,
)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("how", ["missing", "altered", "cut"])
def test_audit_finds_a_damaged_log_entry(store: MemoryStore, how: str, segments: bool) -> None:
    """If a segment has a copy of the damaged entry, all later entries are checked. Otherwise, as many entries as
    possible are checked.
    """
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


def test_missing_log_entries_are_read_from_segment_copies(store: MemoryStore) -> None:
    lagging(store)
    for n in (6, 7, 8, 9):
        store.delete(entry_path(n))
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == VERSIONS
    store.put("log_segments/0000000004.jsonl", b"cut")
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == 0


def test_segment_copy_of_another_log_entry_repairs_nothing(store: MemoryStore) -> None:
    """The copy in the segment is intact and follows the previous entry, but the next entry names another hash."""
    Actors.begin(store).train(VERSIONS)
    lines = store.get("log_segments/0000000004.jsonl").split(b"\n")
    lines[2] = encode(replace(read(store)[6], at=0.0)).data
    store.put("log_segments/0000000004.jsonl", b"\n".join(lines))
    store.delete(entry_path(6))
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == 0


def test_audit_names_each_missing_log_entry(run: MemoryStore) -> None:
    run.delete(entry_path(5))
    what = "log/0000000005.json is missing, but log/0000000006.json exists"
    assert [violation.what for violation in audit(run).violations] == [what]
    run.delete(entry_path(6))
    what = "log/0000000005.json to log/0000000006.json is missing, but log/0000000007.json exists"
    assert [violation.what for violation in audit(run).violations] == [what]


def test_consecutive_missing_log_entries_are_one_violation(run: MemoryStore) -> None:
    for n in (5, 6, 7):
        run.delete(entry_path(n))
    assert found(run) == {("gap", entry_path(5))}
    what = "log/0000000005.json to log/0000000007.json is missing, but log/0000000008.json exists"
    assert audit(run).violations[0].what == what


@pytest.mark.parametrize("end", [9, 10])
def test_long_gap_in_a_log_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    """An audit lists the log folder, even if it is not deep. So it finds stray entries after a gap that readers take
    for the log's end.
    """
    monkeypatch.setattr("rollflow.storage.log.reading.AHEAD", 4)
    store = LocalStore(tmp_path)
    Actors.begin(store).train(VERSIONS)
    forget(store)
    for n in range(6, end):
        store.delete(entry_path(n))
    assert found(store) == {("gap", entry_path(6))}


def test_audit_finds_a_long_gap_by_listing_the_log(run: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.storage.log.reading.AHEAD", 4)
    for n in range(6, 12):
        run.delete(entry_path(n))
    assert found(run) == {("gap", entry_path(6))}


@pytest.mark.parametrize("name", ["99", "notes", "0000000099.json~", "²", "00000000099"])
def test_file_with_an_unknown_name_in_the_log_folder_is_ignored(run: MemoryStore, name: str) -> None:
    run.put(f"log/{name}.json", b"?")
    assert found(run) == set()
    assert Log(run).state.version == VERSIONS


def test_file_with_an_unknown_name_does_not_replace_a_log_entry(run: MemoryStore) -> None:
    run.delete(entry_path(6))
    run.put(f"{entry_path(6)}.aside", b"?")
    assert found(run) == {("gap", entry_path(6))}


def test_audit_finds_an_altered_log_entry_with_a_new_hash(run: MemoryStore) -> None:
    n = committed(run, 2).n
    resealed(run, n, at=0.0)
    assert found(run) == {("altered", entry_path(n))}


def test_audit_finds_a_wrong_hash_in_the_newest_log_entry(run: MemoryStore) -> None:
    n = len(read(run)) - 1
    resealed(run, n, prev="0" * 64)
    assert found(run) == {("altered", entry_path(n))}
    assert audit(run).violations[0].what == f"entry {n} names another hash of entry {n - 1} than that entry has"


def test_audit_finds_an_altered_hash_link_between_log_entries(run: MemoryStore) -> None:
    resealed(run, 6, prev="0" * 64)
    assert found(run) == {("altered", entry_path(6))}


def test_audit_finds_swapped_log_entries(run: MemoryStore) -> None:
    fifth, sixth = run.get(entry_path(5)), run.get(entry_path(6))
    run.put(entry_path(5), sixth)
    run.put(entry_path(6), fifth)
    assert found(run) == {("altered", entry_path(5)), ("altered", entry_path(6))}


def test_audit_finds_swapped_log_entries_with_new_hashes(run: MemoryStore) -> None:
    entries = read(run)
    for n, other in ((5, 6), (6, 5)):
        resealed(run, n, **{name: getattr(entries[other], name) for name in ("id", "role", "claim", "body")})
    assert found(run) >= {("gap", entry_path(5)), ("altered", entry_path(6))}  # batch 1 before batch 0


def test_audit_finds_swapped_log_entries_in_a_new_hash_chain(run: MemoryStore) -> None:
    """A version is published before the batch that it was trained on."""
    entries = read(run)
    n = committed(run, 2).n
    after = published(run, 3).n
    entries[n], entries[after] = entries[after], entries[n]
    rewritten(run, entries)
    assert ("gap", entry_path(n)) in found(run)


def test_missing_first_log_entry_stops_the_audit(run: MemoryStore) -> None:
    data = run.get(entry_path(0))
    run.put(entry_path(0), data[:-9])
    with pytest.raises(Corrupt, match=r"log/0000000000.json is not an entry"):
        audit(run)
    run.delete(entry_path(0))
    with pytest.raises(Corrupt, match=r"log/0000000000.json is missing"):
        audit(run)


@pytest.mark.parametrize(
    "wrong",
    [
        {"async_ratio": None},
        {"async_ratio": "inf"},
        {"async_ratio": -1.0},
        {"group_size": "four"},
        {"group_size": 0},
        {"store": None},
        {"store": "keep_last"},
        {"store": {"keep_last": 0}},
        {"store": {"keep_every": 0}},
        {"store": {"keep_every": "4"}},
        {"store": {"state_every": 0}},
        {"store": {"state_every": None}},
    ],
    ids=str,
)
def test_invalid_config_in_the_first_log_entry_stops_the_audit(run: MemoryStore, wrong: dict[str, object]) -> None:
    changed(run, 0, lambda body: replace(body, config=body.config | wrong))
    with pytest.raises(Corrupt, match="is refused by the log's rules"):
        audit(run)
    changed(run, 0, lambda body: replace(body, config={}))
    with pytest.raises(Corrupt, match="is refused by the log's rules"):
        audit(run)


@pytest.mark.parametrize(("how", "kind"), [("gone", "missing"), ("altered", "altered")])
def test_audit_finds_a_damaged_index_object(store: MemoryStore, how: str, kind: str) -> None:
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


def test_log_entries_after_a_missing_one_are_not_applied(store: MemoryStore) -> None:
    """If the lost entry was a pruning, the audit could apply all later entries, but the resulting state might be
    wrong.
    """
    Actors.begin(store).train(9)
    forget(store)
    lost = of_kind(store, Pruned)[0]
    store.delete(entry_path(lost.n))
    assert ("gap", entry_path(lost.n)) in found(store)
    assert audit(store).versions == lost.version < 9


def test_hash_chain_is_checked_after_a_lost_log_entry(run: MemoryStore) -> None:
    resealed(run, 9, at=0.0)
    run.delete(entry_path(5))
    assert found(run) == {("gap", entry_path(5)), ("altered", entry_path(9))}


def test_audit_reports_a_damaged_newest_log_entry(store: MemoryStore) -> None:
    """The entry is reported once, as damaged, and not also as missing."""
    actors = Actors.begin(store).train(1)
    actors.ahead()
    actors.scheduler.log.settle()
    [*_, seen], n = store.list("log_snapshots"), len(read(store)) - 1
    assert snapshots.from_bytes(store.get(seen)).n == n
    store.put(entry_path(n), store.get(entry_path(n))[:-9])
    assert found(store) == {("altered", entry_path(n))}
    assert audit(store).entries == n + 1


def test_retention_is_checked_after_a_lost_log_entry(run: MemoryStore) -> None:
    gap, newest = entry_path(published(run, 1).n), weights_of(run, VERSIONS)
    run.delete(gap)
    run.delete(newest)
    assert found(run) == {("gap", gap), ("missing", newest)}


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_audit_names_each_damaged_object(run: MemoryStore, how: str) -> None:
    """Each fault is found, except a missing newest entry that no snapshot or earlier audit has recorded."""
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


@pytest.mark.parametrize(
    "rollout",
    [None, [], "none", {"redundant_responses": None}, {"redundant_responses": "two"}, {"redundant_responses": -4}],
    ids=str,
)
def test_malformed_rollout_section_in_the_log_is_one_violation(run: MemoryStore, rollout: object) -> None:
    """All other checks assume that no redundant responses are started."""
    changed_config(run, rollout=rollout)
    assert found(run) == {("lineage", entry_path(0))}
    [violation] = audit(run).violations
    assert violation.what.startswith("the entry's config has rollout")


@pytest.mark.parametrize("pin", [{"kept": "prompts/0"}, {"kept": 7, "size": 1, "sha256": ""}], ids=str)
def test_malformed_prompt_file_record_is_one_violation(run: MemoryStore, pin: dict[str, object]) -> None:
    changed(run, 0, lambda body: replace(body, prompts=(pin,)))
    assert found(run) == {("lineage", entry_path(0))}


def changed_config(run: MemoryStore, **other: object) -> None:
    """Return the run with another config in log entry 0, and with recomputed hashes."""

    def body(before: RunCreated) -> RunCreated:
        config = {**before.config, **other}
        return replace(before, config=config, config_sha256=sha256_of(config))

    changed(run, 0, body)
