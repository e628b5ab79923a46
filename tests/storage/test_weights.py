"""Weights on their way to engines: checked before they serve, whole or not there, whoever else fetches them."""

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
from rollflow.storage.errors import Corrupt
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.policies import Manifest, PolicyStore
from tests.support.s3_server import s3_server, use

SHARDS = {f"weights/model-{n}.safetensors": os.urandom(300_000) for n in range(6)}


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def manifest(run: ObjectStore) -> Manifest:
    store = PolicyStore(run)
    made = Manifest(0, None, store.stage(0, SHARDS), (), None, writer=store.writer)
    store.publish(made)
    return made


def lying(cache: Path) -> list[str]:
    """The folders in a node's cache."""
    return sorted(path.name for path in cache.glob("*/*") if path.name != ".lock")


def whole(folder: Path) -> bool:
    return {f"weights/{f.name}": f.read_bytes() for f in folder.iterdir()} == SHARDS


def test_several_engines_fetch_at_once(run: ObjectStore, manifest: Manifest, tmp_path: Path) -> None:
    """Each gets whole weights at any moment, and nothing else stays in the cache."""
    barrier, right = threading.Barrier(6), []

    def fetch() -> None:
        barrier.wait()
        right.append(whole(PolicyStore(run).weights_folder(manifest, tmp_path / "cache")))

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 6
    assert len(lying(tmp_path / "cache")) == 1


def test_damaged_weights_never_serve(run: ObjectStore, manifest: Manifest, tmp_path: Path) -> None:
    run.put(manifest.weights[3].path, SHARDS["weights/model-3.safetensors"][:-1] + b"x")
    with pytest.raises(Corrupt, match=r"model-3\.safetensors is not what its manifest committed"):
        PolicyStore(run).weights_folder(manifest, tmp_path / "cache")
    run.delete(manifest.weights[3].path)
    with pytest.raises(Corrupt, match=r"model-3\.safetensors is missing"):
        PolicyStore(run).weights_folder(manifest, tmp_path / "cache")
    assert lying(tmp_path / "cache") == []


def published() -> tuple[ObjectStore, Manifest]:
    run = open_store(f"memory://{uuid.uuid4().hex}")
    store = PolicyStore(run)
    return run, Manifest(0, None, store.stage(0, SHARDS), (), None, writer=store.writer)


def test_a_damaged_cache_is_fetched_again(tmp_path: Path) -> None:
    run, manifest = published()
    folder = PolicyStore(run).weights_folder(manifest, tmp_path)
    for damage in (lambda file: file.write_bytes(b"half"), lambda file: file.unlink()):
        damage(folder / "model-2.safetensors")
        assert whole(PolicyStore(run).weights_folder(manifest, tmp_path))


def test_bytes_are_read_once_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashed on their way, not afterwards; whoever else asks finds them checked. So it is with a store's own files."""
    hashed = []
    check = policies._check
    monkeypatch.setattr(policies, "_check", lambda *of: (hashed.append(of[0].path), check(*of)))
    for run in (open_store(f"memory://{uuid.uuid4().hex}"), open_store(str(tmp_path / "run"))):
        store = PolicyStore(run)
        manifest = Manifest(0, None, store.stage(0, SHARDS), (), None, writer=store.writer)
        for _ in range(3):
            assert whole(PolicyStore(run).weights_folder(manifest, tmp_path / "cache"))
        assert sorted(hashed) == sorted(stored.path for stored in manifest.weights)
        hashed.clear()


def test_another_version_lets_the_last_one_go(tmp_path: Path) -> None:
    """What was asked for last stays, however much others fetch meanwhile."""
    run, manifest = published()
    store, other = PolicyStore(run), PolicyStore(run)
    folder = store.weights_folder(manifest, tmp_path)
    for writer in "abcdef":
        other.weights_folder(replace(manifest, writer=writer), tmp_path)
    assert whole(folder)
    store.weights_folder(replace(manifest, writer="g"), tmp_path)
    for writer in "hijk":
        other.weights_folder(replace(manifest, writer=writer), tmp_path)
    assert not folder.exists()
    assert lying(tmp_path) == ["00000000-g", "00000000-j", "00000000-k"]


def fetched(run: ObjectStore, manifest: Manifest, cache: Path, start: Barrier) -> Path:
    """In a process of its own."""
    start.wait(60)
    return PolicyStore(run).weights_folder(manifest, cache)


@pytest.mark.slow
def test_a_node_asks_the_service_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its processes want them at once."""
    reads: Counter[str] = Counter()
    with s3_server("once", reads=reads) as endpoint, multiprocessing.get_context("spawn").Manager() as manager:
        use(endpoint, monkeypatch)
        run = open_store("s3://once/run")
        store = PolicyStore(run)
        manifest = Manifest(0, None, store.stage(0, SHARDS), (), None, writer=store.writer)
        start = manager.Barrier(4)
        with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
            asked = [pool.submit(fetched, run, manifest, tmp_path, start) for _ in range(4)]
            assert all(whole(one.result(60)) for one in asked)
    assert reads == {f"run/{stored.path}": 1 for stored in manifest.weights}
