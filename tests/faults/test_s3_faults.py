"""Tests whole runs and store operations on an S3 service with six kinds of faults, each in one of ten requests."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import Conflict
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import s3_requests
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.objects.s3_requests import PART_BYTES, RetryLimits
from rollflow.tasks.rollout.proxy import WeightsProbe
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.support.s3_server import s3_server, use

pytestmark = pytest.mark.slow

BUCKET = "faults"
KINDS = (Fault.THROTTLE, Fault.ERROR, Fault.RESET, Fault.LOST, Fault.TRUNCATED, Fault.SLOW)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Start the proxy that causes faults. Stores make shorter pauses between tries, but more tries than by default."""
    monkeypatch.setattr(s3_requests, "PATIENT", RetryLimits(tries=25, pause_seconds=0.01, longest_pause_seconds=0.1))
    with FaultyProxy(server, dict.fromkeys(KINDS, 0.1), seed=7) as made:
        use(made.endpoint, monkeypatch)
        yield made


@pytest.fixture
def store() -> S3Store:
    return S3Store(f"{BUCKET}/{uuid.uuid4().hex}")


@pytest.mark.soak
def test_s3_operations_succeed_despite_faults(store: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    contents = {f"a/{n}": os.urandom(size) for n, size in enumerate([0, 1, 1000, PART_BYTES, 3 * PART_BYTES + 5])}
    for path, data in contents.items():
        assert store.put(f"put/{path}", data) == hashlib.sha256(data).hexdigest()
        store.create(f"create/{path}", data)
        with pytest.raises(Conflict):
            store.create(f"create/{path}", data)
    for n, (path, data) in enumerate(contents.items()):
        assert store.get(f"put/{path}") == store.get(f"create/{path}") == data
        assert store.fetch(f"put/{path}", tmp_path / str(n)) == hashlib.sha256(data).hexdigest()
        assert store.stat(f"put/{path}").size == len(data)
    assert list(store.list()) == sorted(f"{write}/{path}" for write in ("put", "create") for path in contents)
    for path in contents:
        store.delete(f"put/{path}")
        assert not store.exists(f"put/{path}")
        assert store.exists(f"create/{path}")
    assert all(proxy.faults[kind] for kind in KINDS)


def test_only_one_of_racing_writers_creates_an_object(store: S3Store, proxy: FaultyProxy) -> None:
    """Although answers are lost, exactly one writer knows that it won, and the object contains the bytes of this
    writer.
    """

    def won(path: str, me: bytes) -> bool:
        try:
            store.create(path, me)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        for turn in range(10):
            racers = [b"%d" % n for n in range(6)]
            outcome = list(pool.map(won, [f"{turn}"] * 6, racers))
            assert [me for me, first in zip(racers, outcome, strict=True) if first] == [store.get(f"{turn}")]


class Fetching(Pipeline):
    """A pipeline whose engines fetch the weights of each version."""

    cache: Path

    async def fetch(self, version: int) -> tuple[Path, WeightsProbe]:
        found = await asyncio.to_thread(self.policies.find, version)
        folder = await asyncio.to_thread(self.policies.weights_folder, found, self.cache)
        assert load_file(folder / "model.safetensors")["number"] == [version]
        return await super().fetch(version)


def test_run_on_a_faulty_s3_ends_with_a_clean_audit(store: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    """No log entry is lost or duplicated by a lost answer."""
    pipeline = Fetching(store, versions=4, train_seconds=0.05)  # type: ignore[arg-type]
    pipeline.cache = tmp_path
    asyncio.run(pipeline.run())
    assert Log(store).state.version == 4
    report = audit(store, deep=True)
    assert report.violations == []
    assert report.trajectories == 4 * 4 * 2
    appended = read(store)
    assert len({entry.id for entry in appended}) == len(appended) == report.entries
    assert all(proxy.faults[kind] > 2 for kind in KINDS)
