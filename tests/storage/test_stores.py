"""The trajectory and policy stores: what a commit promises, on every object store that runs without a server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Conflict, Corrupt, Missing, Stale
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.objects.base import first_missing
from rollflow.storage.policies import Manifest, PolicyStore, Retention, manifest_path
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    Ending,
    GroupKey,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.trajectories import BatchCommit, StagedBatch, TrajectoryStore, commit_path


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


def staged(number: int = 0, started: int = 0) -> StagedBatch:
    gone = Discard(GroupKey(9, 0), DiscardReason.STALE, 0, 12)
    return StagedBatch(number, (group(0, started), group(1, started)), 10, (GroupKey(9, 1),), (gone,))


def test_a_batch_comes_back_as_it_was(run: ObjectStore) -> None:
    record, data = TrajectoryStore(run).commit(staged(), async_ratio=0)
    again, read = TrajectoryStore(run).read(0)
    assert again == record
    assert read.equals(data)
    assert tuple(TrajectoryBatch.from_bytes(read).groups()) == staged().groups
    assert (again.cursor, again.in_flight, again.discards) == (10, (GroupKey(9, 1),), staged().discards)
    assert again.response_tokens == (4, 4)
    assert BatchCommit.from_json(record.to_json(), "x") == record


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


def test_foreign_files_are_corrupt_not_fatal() -> None:
    import pyarrow as pa

    with pytest.raises(Corrupt, match="not a readable Arrow file"):
        TrajectoryBatch.from_bytes(b"PAR1 something else")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("x", pa.int64())])) as writer:
        writer.write_table(pa.table({"x": [1]}))
    with pytest.raises(Corrupt, match="trajectory schema none is not 1"):
        TrajectoryBatch.from_bytes(sink.getvalue())


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
    assert kept == [0, 4, 8, 9, 10]
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
    assert [f.name[:8] for f in sorted(tmp_path.iterdir())] == ["00000005", "00000006", "00000007"]


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
