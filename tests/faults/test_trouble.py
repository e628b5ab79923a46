"""Trouble that only a person can end: one sentence says what, where and the cure, and the run goes on afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3fs

from rollflow.storage.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt, RollflowError
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.policies import Manifest, PolicyStore, manifest_path
from rollflow.tasks.clock import run_virtual
from tests.support.faulty_proxy import FaultyProxy
from tests.support.pipeline import Pipeline
from tests.support.s3_server import s3_server, use
from tests.support.waiting import HANG_SECONDS

NOBODY = 65534
MEBIBYTE = 1 << 20


def publish(run: ObjectStore, version: int) -> None:
    store = PolicyStore(run)
    parent = store.manifest_sha256(version - 1) if version else None
    weights = store.stage(version, {"weights/model.safetensors": bytes([version]) * 2 * MEBIBYTE})
    store.publish(Manifest(version, parent, weights, (), None, writer=store.writer))


@pytest.fixture
def run() -> Iterator[LocalStore]:
    """A local store, in a folder that every user may look into, whose version 0 is published."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    store = LocalStore(folder / "store")
    publish(store, 0)
    yield store
    shutil.rmtree(folder)


def said_under(trouble: Callable[[], None], work: Callable[[], None]) -> str:
    """Kind and words of the error that `work` ends with in a process that is in trouble."""
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        trouble()
        try:
            work()
        except RollflowError as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=HANG_SECONDS)
    assert process.exitcode == 0
    assert ours.poll(), "nothing was said"
    return str(ours.recv())


def goes_on(run: LocalStore) -> None:
    """Nothing of version 1 is there, not even half of it; version 0 is whole, and version 1 can be published now."""
    store = PolicyStore(run)
    assert store.latest() == 0
    objects = {run.root / manifest_path(0), run.root / store.manifest(0).weights[0].path}
    assert {path for path in run.root.rglob("*") if path.is_file()} == objects
    assert len(store.read(store.manifest(0).weights[0])) == 2 * MEBIBYTE
    publish(run, 1)
    assert store.latest() == 1


def test_a_disk_that_takes_no_more(run: LocalStore) -> None:
    said = said_under(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, MEBIBYTE)), lambda: publish(run, 1))
    assert said.startswith(f"StoreFailed: {run.root}/policies/00000001/")
    assert said.endswith(
        "/weights/model.safetensors cannot be written (File too large); nothing was committed: "
        "raise the largest file size that this process may write, then resume the run"
    )
    goes_on(run)


def test_a_store_that_may_not_be_written(run: LocalStore) -> None:
    def demoted() -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)

    run.root.chmod(0o555)
    (run.root / ".tmp").chmod(0o555)
    said = said_under(demoted, lambda: publish(run, 1))
    assert said.startswith("StoreFailed: ")
    assert said.endswith("(Permission denied); nothing was committed: let this user write there, then resume the run")
    said = said_under(demoted, run.check)
    assert said == (
        f"ConfigError: store.uri = '{run.root}' cannot be written (Permission denied); "
        "name a folder that this user may write to, on a disk with space left"
    )
    run.root.chmod(0o755)
    (run.root / ".tmp").chmod(0o755)
    goes_on(run)


def test_a_bucket_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with s3_server("gone") as endpoint:
        use(endpoint, monkeypatch)
        run = S3Store("gone/run")
        publish(run, 0)
        manifest = PolicyStore(run).manifest(0)
        s3fs.S3FileSystem(skip_instance_cache=True).rm("gone", recursive=True)
        works: list[Callable[[], object]] = [
            lambda: publish(run, 1),
            lambda: PolicyStore(run).manifest(0),
            lambda: PolicyStore(run).weights_folder(manifest, tmp_path),
            lambda: run.create("a", b""),
        ]
        for work in works:
            with pytest.raises(
                ConfigError, match="'s3://gone/run' names a bucket that does not exist; create 'gone' or"
            ):
                work()
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_a_clock_that_the_service_does_not_believe(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("clock") as endpoint, FaultyProxy(endpoint) as proxy:
        use(proxy.endpoint, monkeypatch)
        proxy.answer("PUT", 403, "RequestTimeTooSkewed")
        with pytest.raises(ConfigError, match=r"'s3://clock/run' refuses this machine's clock .*; set the clock, then"):
            S3Store("clock/run").put("a", b"")


def test_a_clock_that_jumps_by_hours_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No order is read off a wall clock: the run ends, its audit is clean, and what is kept is the same."""
    straight, real = MemoryStore(uuid.uuid4().hex), time.time
    run_virtual(Pipeline(straight, versions=12).run())
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice((-3600.0, 0.0, 3600.0)))
    jumping = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(jumping, versions=12).run())
    report = audit(jumping)
    assert report.violations == []
    assert report.trajectories == audit(straight).trajectories
    assert kept(jumping) == kept(straight)


def kept(run: ObjectStore) -> set[int]:
    policies = PolicyStore(run)
    return {v for v in range(policies.latest() + 1) if run.exists(policies.manifest(v).weights[0].path)}


def test_a_manifest_of_a_newer_format(run: LocalStore) -> None:
    path = manifest_path(0)
    body = json.loads(run.get(path))
    run.put(path, json.dumps({**body, "format": 3, "code_version": "9.0", "new": {}}).encode())
    with pytest.raises(
        Corrupt,
        match=rf"^{path} has format 3, this version of rollflow reads format 2; "
        r"it was written by rollflow 9\.0: use that one to read it$",
    ):
        PolicyStore(run).manifest(0)
