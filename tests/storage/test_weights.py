"""Tests of downloading weights for engines: weights are checked before use and are never incomplete, even with
concurrent downloads.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import uuid
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from rollflow.storage import policies
from rollflow.storage.deltas import chain
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.policies import PolicyStore, PolicyVersion
from tests.support.batches import begin, learning
from tests.support.s3_server import s3_server, use

SHARDS = {f"weights/model-{n}.safetensors": os.urandom(300_000) for n in range(6)}


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def version(run: ObjectStore) -> PolicyVersion:
    return published(run)


def published(run: ObjectStore) -> PolicyVersion:
    """Publish version 0 of a run with several shards."""
    begin(run)
    store, writer = learning(run)
    state = store.stage(writer, 0, {"learner/state.safetensors": b"s"})
    return store.publish(writer, VersionPublished(0, None, store.stage(writer, 0, SHARDS), state))


def opened(run: ObjectStore) -> PolicyStore:
    """Open the policy store of the run as another process does."""
    return PolicyStore(Log(run))


def lying(cache: Path) -> list[str]:
    """List the folders in a machine's cache."""
    return sorted(path.name for path in cache.glob("*/*") if path.name != ".lock")


def whole(folder: Path) -> bool:
    return {f"weights/{f.name}": f.read_bytes() for f in folder.iterdir()} == SHARDS


def test_several_engines_download_weights_concurrently(
    run: ObjectStore, version: PolicyVersion, tmp_path: Path
) -> None:
    """Each engine gets complete weights, and no other file is left in the cache."""
    barrier, right = threading.Barrier(6), []

    def fetch() -> None:
        barrier.wait()
        right.append(whole(opened(run).weights_folder(version, tmp_path / "cache")))

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 6
    assert len(lying(tmp_path / "cache")) == 1


def test_damaged_weights_are_never_served(run: ObjectStore, version: PolicyVersion, tmp_path: Path) -> None:
    run.put(version.weights[3].path, SHARDS["weights/model-3.safetensors"][:-1] + b"x")
    with pytest.raises(Corrupt, match=r"model-3\.safetensors does not have the content that its log entry names"):
        opened(run).weights_folder(version, tmp_path / "cache")
    run.delete(version.weights[3].path)
    with pytest.raises(Corrupt, match=r"model-3\.safetensors is missing"):
        opened(run).weights_folder(version, tmp_path / "cache")
    assert lying(tmp_path / "cache") == []


def test_damaged_cached_weights_are_downloaded_again(tmp_path: Path) -> None:
    run = open_store(f"memory://{uuid.uuid4().hex}")
    version = published(run)
    folder = opened(run).weights_folder(version, tmp_path)
    for damage in (lambda file: file.write_bytes(b"half"), lambda file: file.unlink()):
        damage(folder / "model-2.safetensors")
        assert whole(opened(run).weights_folder(version, tmp_path))


def test_weight_files_are_downloaded_once_per_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are hashed during the download, and not by later callers. Files of a local store are also hashed once."""
    hashed = []
    check = chain.check_object
    for module in (policies, chain):
        monkeypatch.setattr(module, "check_object", lambda *of: (hashed.append(of[0].path), check(*of)))
    for run in (open_store(f"memory://{uuid.uuid4().hex}"), open_store(str(tmp_path / "run"))):
        version = published(run)
        for _ in range(3):
            assert whole(opened(run).weights_folder(version, tmp_path / "cache"))
        assert sorted(hashed) == sorted(stored.path for stored in version.weights)
        hashed.clear()


def test_next_policy_version_releases_the_previous_folder(tmp_path: Path) -> None:
    """The last version that a process requested is kept, however many versions other processes download."""
    run = open_store(f"memory://{uuid.uuid4().hex}")
    version = published(run)
    store, other = opened(run), opened(run)
    folder = store.weights_folder(version, tmp_path)
    for number in range(1, 7):
        other.weights_folder(replace(version, number=number), tmp_path)
    assert whole(folder)
    store.weights_folder(replace(version, number=7), tmp_path)
    for number in range(8, 12):
        other.weights_folder(replace(version, number=number), tmp_path)
    assert not folder.exists()
    assert lying(tmp_path) == [f"{number:08d}-{version.sha256[:12]}" for number in (7, 10, 11)]


def test_other_weights_of_the_same_version_have_their_own_folder(tmp_path: Path) -> None:
    """A run that was deleted and created again with the same name has other weights for the same versions."""
    run = open_store(f"memory://{uuid.uuid4().hex}")
    version = published(run)
    opened(run).weights_folder(version, tmp_path)
    other = {name: data[::-1] for name, data in SHARDS.items()}
    for path in list(run.list()):
        run.delete(path)
    begin(run)
    store, writer = learning(run)
    state = store.stage(writer, 0, {"learner/state.safetensors": b"s"})
    again = store.publish(writer, VersionPublished(0, None, store.stage(writer, 0, other), state))
    folder = store.weights_folder(again, tmp_path)
    assert {f"weights/{f.name}": f.read_bytes() for f in folder.iterdir()} == other


def fetched(run: ObjectStore, version: PolicyVersion, cache: Path, start: Barrier) -> Path:
    """Download a version's weights in a separate process."""
    start.wait(60)
    return opened(run).weights_folder(version, cache)


@pytest.mark.slow
def test_node_requests_each_weight_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of processes of a machine may request the files at the same time."""
    reads: Counter[str] = Counter()
    with s3_server("once", reads=reads) as endpoint, multiprocessing.get_context("spawn").Manager() as manager:
        use(endpoint, monkeypatch)
        run = open_store("s3://once/run")
        version = published(run)
        start = manager.Barrier(4)
        with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
            asked = [pool.submit(fetched, run, version, tmp_path, start) for _ in range(4)]
            assert all(whole(one.result(60)) for one in asked)
    files = {path: count for path, count in reads.items() if not path.startswith("run/log/")}
    assert files == {f"run/{stored.path}": 1 for stored in version.weights}
