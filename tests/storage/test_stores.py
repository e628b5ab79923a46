"""The trajectory and policy stores: what a commit promises, on every object store that runs without a server."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.batch import SCHEMA, TrajectoryBatch
from rollflow.storage.errors import Conflict, Corrupt, Missing, Stale
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.objects.base import first_missing
from rollflow.storage.policies import Manifest, PolicyStore, Retention, manifest_path
from rollflow.storage.records import (
    Cursor,
    Discard,
    DiscardReason,
    Ending,
    GroupKey,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.trajectories import BatchCommit, StagedBatch, TrajectoryStore, commit_path, void_path
from rollflow.tasks.rollout.scheduler import Beginning


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def group(prompt: int, started: int = 0, attempt: int = 0) -> TrajectoryGroup:
    made = tuple(
        Trajectory(
            s, started, (1, 2, 3), (False, True, True), (0.0, -0.5, -0.25), (-1, started, started), s, "r", Ending.STOP
        )
        for s in range(2)
    )
    return TrajectoryGroup(GroupKey(prompt, attempt), f"p{prompt}", "test", made)


def counted(issued: int) -> Cursor:
    """The cursor of one source."""
    return Cursor((issued,), (0,))


def staged(number: int = 0, started: int = 0) -> StagedBatch:
    gone = Discard(GroupKey(9, 0), DiscardReason.STALE, 0, 12)
    return StagedBatch(number, (group(0, started), group(1, started)), counted(10), (GroupKey(9, 1),), (gone,))


def test_a_batch_comes_back_as_it_was(run: ObjectStore) -> None:
    record, data = TrajectoryStore(run).commit(staged(), async_ratio=0)
    again, read = TrajectoryStore(run).read(0)
    assert again == record
    assert read.equals(data)
    assert tuple(TrajectoryBatch.from_bytes(read).groups()) == staged().groups
    assert (again.cursor, again.in_flight, again.discards) == (counted(10), (GroupKey(9, 1),), staged().discards)
    assert again.response_tokens == (4, 4)
    assert BatchCommit.from_json(record.to_json(), record.path) == record


def test_a_batch_is_committed_once(run: ObjectStore) -> None:
    """A second scheduler loses, and has changed nothing."""
    TrajectoryStore(run).commit(staged(), 0)
    before = run.get(commit_path(0))
    with pytest.raises(Conflict):
        TrajectoryStore(run).commit(staged(), 0)
    assert run.get(commit_path(0)) == before
    TrajectoryStore(run).read(0)


def test_a_batch_without_its_record_does_not_exist(run: ObjectStore) -> None:
    """Killed between the two writes: nothing happened, and the next commit goes through."""
    first = TrajectoryStore(run)
    run.put(f"trajectories/00000000-{first.writer}.arrow", b"half a fi")
    assert not first.committed(0)
    with pytest.raises(Missing):
        first.read(0)
    TrajectoryStore(run).commit(staged(), 0)
    assert TrajectoryStore(run).next_number() == 1


def test_stale_groups_are_refused(run: ObjectStore) -> None:
    with pytest.raises(Stale):
        TrajectoryStore(run).commit(staged(number=3, started=0), async_ratio=2)
    assert not TrajectoryStore(run).committed(3)
    TrajectoryStore(run).commit(staged(number=3, started=1), async_ratio=2)


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: d + b"x", lambda d: bytes([d[0] ^ 1]) + d[1:]])
def test_damaged_batches_are_named(run: ObjectStore, damage: Callable[[bytes], bytes]) -> None:
    record, _ = TrajectoryStore(run).commit(staged(), 0)
    run.put(record.file, damage(run.get(record.file)))
    with pytest.raises(Corrupt, match=record.file):
        TrajectoryStore(run).read(0)


def arrow_file(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


GOOD = TrajectoryBatch.from_groups((group(0), group(1))).table
REWARD = SCHEMA.get_field_index("reward")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a readable Arrow file"),
        (b"PAR1 something else", "not a readable Arrow file"),
        (arrow_file(GOOD).to_pybytes()[:-20], "not a readable Arrow file"),  # the footer is cut off
        (arrow_file(pa.table({"x": [1]})), "trajectory schema none is not 1"),
        (arrow_file(GOOD.replace_schema_metadata({b"rollflow.schema": b"2"})), "trajectory schema 2 is not 1"),
        (arrow_file(GOOD.drop_columns("reward")), "columns are not those of trajectory schema 1"),
        (
            arrow_file(GOOD.set_column(REWARD, "reward", GOOD["reward"].cast(pa.float64()))),
            "columns are not those of trajectory schema 1",
        ),
        (arrow_file(GOOD.set_column(REWARD, SCHEMA.field(REWARD), pa.nulls(4, pa.float32()))), "holds nulls"),
    ],
)
def test_foreign_files_are_corrupt_not_fatal(data: bytes | pa.Buffer, message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        TrajectoryBatch.from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
    st.integers(0, 4000),
    st.integers(0, 4000),
)
def test_any_damage_is_corrupt_or_harmless(flips: list[tuple[int, int]], start: int, cut: int) -> None:
    """Whatever bytes arrive, the answer is a batch that can be read through or `Corrupt`; never another error."""
    data = bytearray(arrow_file(GOOD).to_pybytes())
    for place, value in flips:
        data[place % len(data)] = value
    damaged = bytes(data[:start] + data[start + cut % 9 :])
    try:
        batch = TrajectoryBatch.from_bytes(damaged)
    except Corrupt:
        return
    assert len(batch.table.to_pylist()) == len(batch)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_an_altered_commit_is_corrupt(place: int, value: int) -> None:
    """A commit proves itself: no digit of a cursor can change unseen."""
    record, _ = TrajectoryStore(open_store(f"memory://{uuid.uuid4().hex}")).commit(staged(), 0)
    data = bytearray(record.to_json())
    data[place % len(data)] = value
    try:
        assert BatchCommit.from_json(bytes(data), record.path) == record
    except Corrupt as error:
        assert record.path in str(error)  # noqa: PT017 - either way is right


def test_a_commit_under_another_name_is_corrupt() -> None:
    record, _ = TrajectoryStore(open_store(f"memory://{uuid.uuid4().hex}")).commit(staged(), 0)
    with pytest.raises(Corrupt, match="under another name"):
        BatchCommit.from_json(record.to_json(), commit_path(1))


def test_a_voided_batch_is_committed_again_as_its_next_edition(run: ObjectStore) -> None:
    first, other = TrajectoryStore(run), TrajectoryStore(run)
    record, data = first.commit(staged(), 0)
    first.void(0, "a good batch is not voided")
    assert first.voided() == 0
    run.put(record.file, data.to_pybytes()[:-1])
    other.void(0, "too short")
    other.void(0, "again")
    first.void(0, "and again")
    [void] = first.voids()
    assert (void.batch, void.edition, void.file, void.reason) == (0, 0, record.file, "too short")
    assert not first.committed(0)
    with pytest.raises(Missing):
        first.read(0)
    with pytest.raises(Conflict):
        first.commit(staged(), 0)  # the old name stays taken
    second, data = first.commit(replace(staged(), edition=1), 0)
    assert other.record(0) == second
    assert other.read(0)[1].equals(data)
    assert other.commit_sha256(0) == hashlib.sha256(run.get("trajectories/00000000.1.json")).hexdigest()
    assert other.discards(second) == (*staged().discards, *staged().discards)


def test_racing_voids_of_one_batch_are_one(run: ObjectStore) -> None:
    for number in range(10):
        record, _ = TrajectoryStore(run).commit(staged(number, number), 0)
        run.delete(record.file)
        together(*(lambda number=number: TrajectoryStore(run).void(number, "gone") for _ in range(4)))
    assert [(v.batch, v.edition) for v in TrajectoryStore(run).voids()] == [(n, 0) for n in range(10)]


def test_an_unreadable_void_voids_nothing(run: ObjectStore) -> None:
    batches = TrajectoryStore(run)
    record, _ = batches.commit(staged(), 0)
    run.delete(record.file)
    run.put(void_path(0), b"{}")
    assert batches.current_edition(0) == 0
    batches.void(0, "gone")
    assert [v.batch for v in batches.voids()] == [-1, 0]


def test_bytes_from_elsewhere_are_checked_against_the_commit(run: ObjectStore) -> None:
    batches = TrajectoryStore(run)
    record, data = batches.commit(staged(), 0)
    batches.verify(record, data)
    with pytest.raises(Corrupt, match=record.file):
        batches.verify(record, data.to_pybytes()[:-1] + b"?")


def test_a_scheduler_that_does_not_know_of_a_void_commits_nothing_more(run: ObjectStore) -> None:
    """The settlement takes the name it would use; the groups of the voided batch are discarded once."""
    batches = TrajectoryStore(run)
    for number in range(2):
        record, _ = batches.commit(
            StagedBatch(number, (group(number, number),), counted(number + 1), (), (), order=number), async_ratio=0
        )
    run.delete(record.file)
    batches.void(1, "gone")
    found = Beginning.of(TrajectoryStore(run), 1)
    assert found == Beginning(3, counted(2), (GroupKey(1, 1),), ((1, 1), (2, 1)), 3, 1)
    assert Beginning.of(TrajectoryStore(run), 1) == found  # settled once
    settlement = batches.record_of(2, 0)
    assert settlement.discards == (Discard(GroupKey(1, 0), DiscardReason.CORRUPT, 1, 4),)
    with pytest.raises(Conflict):
        batches.commit(StagedBatch(2, (group(2, 2),), counted(3), (), (), order=2), async_ratio=0)


@pytest.mark.parametrize("lost", ["file", "commit"])
def test_a_settlement_counts_issued_and_filtered_by_source(run: ObjectStore, lost: str) -> None:
    """Two sources, batch 1 of three is lost; what only its commit knew of is issued again under the same key."""
    batches = TrajectoryStore(run)
    filtered = [(3,), (4, 5), (8,)]  # by batch
    cursors = Cursor((2, 2), (0, 1)), Cursor((4, 3), (1, 2)), Cursor((6, 3), (2, 2))
    flying = (), (GroupKey(6, 0),), (GroupKey(10, 0),)
    groups = (0, 1), (2,), (6,)
    for number, prompts in enumerate(groups):
        gone = tuple(Discard(GroupKey(prompt, 0), DiscardReason.FILTERED, number, 7) for prompt in filtered[number])
        made = tuple(group(prompt, number) for prompt in prompts)
        batches.commit(StagedBatch(number, made, cursors[number], flying[number], gone, order=number), async_ratio=0)
    record = batches.record(1)
    run.put(record.path if lost == "commit" else record.file, b"rotten")
    batches.void(1, "rotten")
    found = Beginning.of(TrajectoryStore(run), 1)
    assert found.missing == ((1, 1), (3, 1))
    if lost == "file":
        assert found.cursor == Cursor((6, 3), (2, 2))
        assert found.again == (GroupKey(2, 1), GroupKey(10, 0))
    else:
        assert found.cursor == Cursor((6, 3), (1, 1))  # 4 and 5 are no longer known to be filtered
        assert found.again == (GroupKey(2, 0), GroupKey(4, 0), GroupKey(5, 0), GroupKey(10, 0))


def test_a_cursor_by_hand() -> None:
    cursor = Cursor((3, 1), (0, 1))
    assert list(cursor.indices()) == [0, 2, 4, 1]
    assert cursor.upcoming == (6, 3)
    assert [index for index in range(9) if cursor.covers(index)] == [0, 1, 2, 4]
    assert not Cursor().covers(0)
    assert list(Cursor().indices()) == []
    with pytest.raises(ValueError, match="a cursor of 2 sources counts what 1 had filtered"):
        Cursor((3, 1), (0,))


def together(*calls: Callable[[], object]) -> None:
    """Run them at the same moment, each in a thread."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], object]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(one, calls))


def publish(store: PolicyStore, version: int) -> None:
    parent = store.manifest_sha256(version - 1) if version else None
    weights = store.stage(version, {"weights/model.safetensors": f"{version} by {store.writer}".encode()})
    state = store.stage(version, {"learner/state.safetensors": b"s"})
    store.publish(Manifest(version, parent, weights, state, None, writer=store.writer))


def test_one_learner_wins(run: ObjectStore) -> None:
    """Two learners race for every version: exactly one publishes it, and its own objects are the ones named."""
    publish(PolicyStore(run), 0)
    for version in range(1, 21):
        stores, losses = [PolicyStore(run) for _ in range(2)], []
        barrier = threading.Barrier(2)

        def race(store: PolicyStore, version: int = version, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                publish(store, version)
            except Conflict:
                losses.append(store.writer)  # noqa: B023 - read in this iteration

        threads = [threading.Thread(target=race, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(losses) == 1
        manifest = PolicyStore(run).manifest(version)
        assert manifest.writer not in losses
        assert PolicyStore(run).read(manifest.weights[0]) == f"{version} by {manifest.writer}".encode()


def test_retention_keeps_the_newest_and_every_nth(run: ObjectStore) -> None:
    store = PolicyStore(run, Retention(keep_last=3, keep_every=4))
    for version in range(11):
        publish(store, version)
    kept = [v for v in range(11) if run.exists(store.manifest(v).weights[0].path)]
    assert kept == [0, 3, 4, 7, 8, 9, 10]  # each kept version, and what it can be trained again from
    assert all(run.exists(manifest_path(v)) for v in range(11))


def test_weights_are_local_files(run: ObjectStore, tmp_path: Path) -> None:
    store = PolicyStore(run)
    publish(store, 0)
    folder = store.weights_folder(store.manifest(0), tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == f"0 by {store.writer}".encode()
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]


def test_a_cache_of_fetched_weights_stays_small(tmp_path: Path) -> None:
    store = PolicyStore(open_store(f"memory://{uuid.uuid4().hex}"))
    for version in range(8):
        publish(store, version)
        folder = store.weights_folder(store.manifest(version), tmp_path)
        assert (folder / "model.safetensors").exists()
    assert [f.name[:8] for f in sorted(tmp_path.glob("*/[0-9]*"))] == ["00000005", "00000006", "00000007"]


def test_altered_weights_are_refused(run: ObjectStore) -> None:
    store = PolicyStore(run)
    publish(store, 0)
    stored = store.manifest(0).weights[0]
    run.put(stored.path, b"other")
    with pytest.raises(Corrupt, match="is not what its manifest committed"):
        store.read(stored)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_the_end_of_a_chain_is_found_by_probing(count: int, start: int) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for number in range(count):
        store.put(f"n/{number}", b"")
    expected = count if start < count else start
    assert first_missing(store, lambda n: f"n/{n}", start) == expected
