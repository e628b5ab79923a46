"""The audit accepts what the pipeline writes, and names each kind of violation that is planted in it."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from rollflow.storage.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Missing
from rollflow.storage.log.entries import decode, encode, entry_path
from rollflow.storage.log.log import Log
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import Manifest, PolicyStore, manifest_path
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey, TrajectoryGroup
from rollflow.storage.trajectories import BatchCommit, TrajectoryStore, commit_path
from rollflow.tasks.clock import run_virtual
from tests.support.described import change_config
from tests.support.pipeline import Damage, Pipeline, damaged


@pytest.fixture
def run() -> MemoryStore:
    """A finished run of six versions."""
    store = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(store).run())
    assert audit(store).clean
    return store


def rewrite(run: MemoryStore, number: int, change: Callable[[list[TrajectoryGroup]], list[TrajectoryGroup]]) -> None:
    """Replace batch `number` by a changed one, with commit, manifests and hashes all consistent again."""
    store = TrajectoryStore(run)
    record, data = store.read(number)
    groups = change(TrajectoryBatch.from_bytes(data).groups())
    data = TrajectoryBatch.from_groups(groups).to_bytes()
    run.put(record.file, memoryview(data))
    record = replace(
        record,
        rows=sum(len(g.trajectories) for g in groups),
        size=data.size,
        sha256=hashlib.sha256(data).hexdigest(),
        groups=tuple(g.key for g in groups),
    )
    recommit(run, record)


def recommit(run: MemoryStore, record: BatchCommit) -> None:
    """Replace a commit, and every manifest from there on, so that only the planted change is wrong."""
    run.put(commit_path(record.number), record.to_json())
    policies = PolicyStore(run)
    for version in range(record.number + 1, policies.latest() + 1):
        manifest = replace(policies.manifest(version), parent=policies.manifest_sha256(version - 1))
        if version == record.number + 1:
            batch = hashlib.sha256(record.to_json()).hexdigest()
            manifest = replace(manifest, batch=batch, consumed=record.groups, discarded=record.discards)
        run.put(manifest_path(version), manifest.to_json())


def beyond(record: BatchCommit, source: int = 0) -> Cursor:
    """The cursor of a commit, with one source a prompt further."""
    issued = (count + (which == source) for which, count in enumerate(record.cursor.issued))
    return replace(record.cursor, issued=tuple(issued))


def kinds(run: MemoryStore) -> set[str]:
    return {violation.kind for violation in audit(run).violations}


def test_too_stale(run: MemoryStore) -> None:
    def older(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [replace(g, trajectories=tuple(replace(t, started_version=2) for t in g.trajectories)) for g in groups]

    rewrite(run, 4, older)
    [violation] = audit(run).violations
    assert violation.kind == "stale"
    assert violation.what == "trained at staleness 2, async_ratio is 1.0"


def test_a_token_from_a_version_that_did_not_exist_yet(run: MemoryStore) -> None:
    def later(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        first = groups[0].trajectories[0]
        versions = tuple(v if v < 0 else 9 for v in first.versions)
        changed = (replace(first, versions=versions), *groups[0].trajectories[1:])
        return [replace(groups[0], trajectories=changed), *groups[1:]]

    rewrite(run, 3, later)
    assert kinds(run) == {"stale"}


def test_a_prompt_trained_on_twice(run: MemoryStore) -> None:
    again = TrajectoryBatch.from_bytes(TrajectoryStore(run).read(2)[1]).groups()[0]
    rewrite(run, 3, lambda groups: [replace(groups[0], key=again.key), *groups[1:]])
    assert kinds(run) == {"duplicate", "missing"}  # and the group it took the place of is gone


def test_two_fates(run: MemoryStore) -> None:
    record = TrajectoryStore(run).record(3)
    fate = Discard(record.groups[0], DiscardReason.FILTERED, 2, 10)
    recommit(run, replace(record, discards=(*record.discards, fate)))
    assert kinds(run) == {"duplicate", "lineage"}  # nor does the cursor count it as filtered


def test_a_lost_prompt(run: MemoryStore) -> None:
    record = TrajectoryStore(run).record(5)
    recommit(run, replace(record, cursor=beyond(record)))
    assert kinds(run) >= {"missing"}


@pytest.fixture
def mixed() -> MemoryStore:
    """A finished run of six versions, from two sources."""
    store = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(store, shares=(3.0, 1.0)).run())
    assert audit(store).clean
    return store


@pytest.mark.parametrize("source", [0, 1])
def test_a_lost_prompt_of_one_source_of_two(mixed: MemoryStore, source: int) -> None:
    record = TrajectoryStore(mixed).record(5)
    recommit(mixed, replace(record, cursor=beyond(record, source)))
    where = f"prompt {record.cursor.upcoming[source]}"
    assert [(v.kind, v.where) for v in audit(mixed).violations if v.kind == "missing"] == [("missing", where)]


def test_an_index_skipped_in_one_source(mixed: MemoryStore) -> None:
    """A group is moved one position further in its source, and the cursor with it: the gap it leaves is found."""
    record = TrajectoryStore(mixed).record(5)
    assert record.in_flight == ()
    moved = max(key for key in record.groups if key.prompt % 2 == 1)

    def onward(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [replace(g, key=GroupKey(moved.prompt + 2, 0)) if g.key == moved else g for g in groups]

    rewrite(mixed, 5, onward)
    assert kinds(mixed) == {"missing", "lineage"}  # it lies beyond the cursor, too
    recommit(mixed, replace(TrajectoryStore(mixed).record(5), cursor=beyond(record, 1)))
    assert [(v.kind, v.where) for v in audit(mixed).violations] == [("missing", f"prompt {moved.prompt}")]


def test_a_cursor_that_miscounts_what_was_filtered(mixed: MemoryStore) -> None:
    """A source's share would be wrong from there on."""
    record = TrajectoryStore(mixed).record(5)
    recommit(mixed, replace(record, cursor=replace(record.cursor, filtered=(0, 1))))
    [violation] = audit(mixed).violations
    assert (violation.kind, violation.where) == ("lineage", "source 1")
    assert violation.what == "0 of its groups were filtered, the cursor counts 1"


def test_a_commit_of_another_number_of_sources(mixed: MemoryStore) -> None:
    record = TrajectoryStore(mixed).record(2)
    recommit(mixed, replace(record, cursor=Cursor((record.cursor.issued[0],), (0,))))
    [violation] = audit(mixed).violations
    assert (violation.where, violation.what) == ("batch 2", "its cursor has 1 sources, the newest one 2")


def test_groups_are_counted_by_domain(mixed: MemoryStore) -> None:
    assert audit(mixed).domains == {"source 0": 18, "source 1": 6}


def test_a_discard_that_was_never_issued_again(run: MemoryStore) -> None:
    record = TrajectoryStore(run).record(5)
    lost = GroupKey(record.cursor.upcoming[0], 0)
    fate = Discard(lost, DiscardReason.STALE, 2, 10)
    recommit(run, replace(record, cursor=beyond(record), discards=(*record.discards, fate)))
    assert kinds(run) >= {"missing"}


def test_a_version_gap(run: MemoryStore) -> None:
    run.delete(manifest_path(3))
    assert "gap" in kinds(run)


def test_a_batch_gap(run: MemoryStore) -> None:
    run.delete(commit_path(2))
    assert kinds(run) >= {"gap", "missing"}


@pytest.mark.parametrize("which", ["weights", "trajectories", "manifest", "commit"])
def test_an_altered_file(run: MemoryStore, which: str) -> None:
    path = {
        "weights": PolicyStore(run).manifest(5).weights[0].path,
        "trajectories": TrajectoryStore(run).record(4).file,
        "manifest": manifest_path(4),
        "commit": commit_path(4),
    }[which]
    data = bytearray(run.get(path))
    data[len(data) // 2] ^= 1
    run.put(path, bytes(data))
    assert kinds(run) & {"altered", "lineage"}, audit(run).violations


def test_a_missing_file(run: MemoryStore) -> None:
    run.delete(PolicyStore(run).manifest(6).weights[0].path)
    assert kinds(run) == {"missing"}


def test_objects_that_retention_removed_are_not_missing() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(store, versions=14).run())
    kept = {v for v in range(15) if store.exists(PolicyStore(store).manifest(v).weights[0].path)}
    assert kept == {0, 9, 10, 11, 12, 13, 14}  # 9: what 10 can be trained again from
    assert audit(store).clean


def test_a_claim_that_was_altered_or_is_gone(run: MemoryStore) -> None:
    for who in ("first", "second", "third"):
        Log(run).claim("supervisor", who=who)
    assert audit(run).clean
    whole = {n: run.get(entry_path(n)) for n in (2, 3)}
    run.put(entry_path(3), whole[3].replace(b"third", b"fourth"))
    assert [(v.kind, v.where) for v in audit(run).violations] == [("altered", entry_path(3))]
    run.put(entry_path(3), whole[3])
    run.put(entry_path(2), encode(replace(decode(whole[2], 2, run.get).entry, id="another")).data)
    (violation,) = audit(run).violations
    assert "0000000003.json cannot stand where it stands" in violation.what
    run.delete(entry_path(2))
    (violation,) = audit(run).violations
    assert "0000000002.json is missing" in violation.what


def test_a_foreign_parent(run: MemoryStore) -> None:
    policies = PolicyStore(run)
    manifest: Manifest = replace(policies.manifest(6), parent="0" * 64)
    run.put(manifest_path(6), manifest.to_json())
    assert kinds(run) == {"lineage"}


def test_the_bound_comes_from_storage(run: MemoryStore) -> None:
    """A stricter config makes the same trajectories a violation: the audit recomputes, it does not believe."""
    change_config(run, async_ratio=0.0)
    assert kinds(run) == {"stale"}


@pytest.mark.parametrize(
    ("damage", "corrupt"),
    [
        ({(2, 0): "cut", (2, 1): "gone"}, 8),
        ({(0, 0): "flipped"}, 4),
        ({(4, 0): "commit"}, 0),  # what only the commit knew of is issued again as it was
    ],
)
def test_a_quarantined_batch_is_named_and_no_violation(damage: dict[tuple[int, int], Damage], corrupt: int) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(store, async_ratio=2.0, damage=damage).run())
    report = audit(store)
    assert report.violations == []
    voids = TrajectoryStore(store).voids()
    assert [(v.batch, v.edition) for v in voids] == list(damage)
    assert [line.split(":")[0] for line in report.quarantined] == [v.file for v in voids]
    assert report.fates["discarded: corrupt"] == corrupt
    assert report.fates["trained"] == 6 * 4


def test_a_batch_quarantined_after_it_was_trained_on_is_altered(run: MemoryStore) -> None:
    record = TrajectoryStore(run).record(3)
    run.put(record.file, b"something else")
    TrajectoryStore(run).void(3, "for the test")
    assert kinds(run) == {"altered"}


def test_a_damaged_batch_that_nobody_has_noticed_is_altered() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(store, versions=3).run())
    batches = TrajectoryStore(store)
    manifest = PolicyStore(store).manifest(3)
    store.delete(manifest_path(3))  # batch 2 is committed and waits
    damaged(store, batches.record(2), "flipped")
    assert kinds(store) == {"altered"}
    batches.void(2, "for the test")
    assert audit(store).fates["quarantined"] == len(manifest.consumed)
    assert kinds(store) == set()


def test_no_run_there() -> None:
    with pytest.raises(Missing):
        audit(MemoryStore(uuid.uuid4().hex))
