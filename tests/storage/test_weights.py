"""Weights on their way to engines: checked before they serve, whole or not there, whoever else fetches them."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

import pytest

from rollflow.storage.errors import Corrupt
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.policies import Manifest, PolicyStore

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
    assert len(list((tmp_path / "cache").glob("*"))) == (0 if run.local_path("a") else 1)


def test_damaged_weights_never_serve(run: ObjectStore, manifest: Manifest, tmp_path: Path) -> None:
    run.put(manifest.weights[3].path, SHARDS["weights/model-3.safetensors"][:-1] + b"x")
    with pytest.raises(Corrupt, match=r"model-3\.safetensors is not what its manifest committed"):
        PolicyStore(run).weights_folder(manifest, tmp_path / "cache")
    run.delete(manifest.weights[3].path)
    with pytest.raises(Corrupt, match=r"model-3\.safetensors is missing"):
        PolicyStore(run).weights_folder(manifest, tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*")) == []


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


def test_what_a_killed_process_was_fetching_goes_after_a_day(tmp_path: Path) -> None:
    run, manifest = published()
    for name in (".fetching-old", ".fetching-new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".fetching-old", (0, 0))
    assert whole(PolicyStore(run).weights_folder(manifest, tmp_path))
    assert {f.name for f in tmp_path.glob(".*")} == {".fetching-new"}
