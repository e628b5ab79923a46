"""Tests faults that only the user can fix: an error of one sentence names the fault, its place and the fix, and the run
can continue.
"""

from __future__ import annotations

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

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, RollflowError
from rollflow.storage.log.entries import RunCreated, VersionPublished, entry_path
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.policies import PolicyStore
from rollflow.tasks.run.context import FORMAT, RunContext
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.batches import begin, learning, scheduling, staged
from tests.support.faulty_proxy import FaultyProxy
from tests.support.forked import alone
from tests.support.pipeline import Pipeline
from tests.support.s3_server import s3_server, use
from tests.support.waiting import HANG_SECONDS

NOBODY = 65534
MEBIBYTE = 1 << 20


def publish(policies: PolicyStore, writer: Writer) -> None:
    """Publish the next version, of two mebibytes, from the waiting batch."""
    version, state = policies.newest() + 1, policies.log.state
    weights = policies.stage(writer, version, {"weights/model.safetensors": bytes([version]) * 2 * MEBIBYTE})
    learned = policies.stage(writer, version, {"learner/state.safetensors": b"state"})
    batch = state.waiting[version - 1].entry if version else None
    policies.publish(writer, VersionPublished(version, batch, weights, learned))


def started(run: ObjectStore) -> tuple[PolicyStore, Writer]:
    """Create a run with version 0 and the batch for version 1; return its learner."""
    begin(run)
    policies, writer = learning(run)
    publish(policies, writer)
    batches, scheduler = scheduling(run)
    batches.commit(scheduler, staged())
    policies.newest()
    return policies, writer


@pytest.fixture
def learner() -> Iterator[tuple[PolicyStore, Writer]]:
    """Return the learner of a started run, in a folder that every user may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield started(LocalStore(folder / "store"))
    shutil.rmtree(folder)


@pytest.fixture
def run(learner: tuple[PolicyStore, Writer]) -> LocalStore:
    """Return the run's storage."""
    run = learner[0].store
    assert isinstance(run, LocalStore)
    return run


@pytest.fixture
def objects(run: LocalStore) -> set[Path]:
    """Return the files in the store at the start of the run."""
    return files_of(run)


def files_of(run: LocalStore) -> set[Path]:
    return {path for path in run.root.rglob("*") if path.is_file()}


def said_under(trouble: Callable[[], None], work: Callable[[], object]) -> str:
    """Call `trouble` and then `work` in a child process; return the type and the message of the error that `work`
    raises.
    """
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        trouble()
        try:
            work()
        except RollflowError as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = multiprocessing.get_context("fork").Process(target=alone, args=(child,))
    process.start()
    process.join(timeout=HANG_SECONDS)
    assert process.exitcode == 0
    assert ours.poll(), "nothing was said"
    return str(ours.recv())


def goes_on(run: LocalStore, objects: set[Path]) -> None:
    """Check that no part of version 1 exists, version 0 is intact, and version 1 can be published now."""
    assert files_of(run) == objects
    policies, writer = learning(run)
    assert policies.newest() == 0
    assert len(policies.read(policies.find(0).weights[0])) == 2 * MEBIBYTE
    publish(policies, writer)
    assert Log(run).state.version == 1


def test_full_disk_while_publishing_gives_an_error_with_a_fix(
    learner: tuple[PolicyStore, Writer], run: LocalStore, objects: set[Path]
) -> None:
    said = said_under(
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, MEBIBYTE)), lambda: publish(*learner)
    )
    assert said.startswith(f"StoreFailed: {run.root}/policies/00000001/")
    assert said.endswith(
        "/weights/model.safetensors cannot be written (File too large), and nothing was committed; "
        "raise the largest file size that this process may write (ulimit -f), then resume the run"
    )
    goes_on(run, objects)


def test_full_disk_while_appending_leaves_the_log_unchanged(
    learner: tuple[PolicyStore, Writer], run: LocalStore, objects: set[Path]
) -> None:
    log = learner[0].log
    said = said_under(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)), lambda: log.claim("learner"))
    assert said.startswith(
        f"StoreFailed: {run.root}/{entry_path(log.state.n + 1)} cannot be written (File too large), and nothing "
    )
    goes_on(run, objects)


def test_read_only_store_is_refused(learner: tuple[PolicyStore, Writer], run: LocalStore, objects: set[Path]) -> None:
    def demoted() -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)

    run.root.chmod(0o555)
    (run.root / ".tmp").chmod(0o555)
    said = said_under(demoted, lambda: publish(*learner))
    assert said.startswith("StoreFailed: ")
    assert said.endswith(
        "(Permission denied), and nothing was committed; give this user the right to write the file, then resume "
        "the run"
    )
    said = said_under(demoted, run.check)
    assert said == (
        f"ConfigError: store.uri = '{run.root}' cannot be written (Permission denied); "
        "name a folder that this user may write to, on a disk with space left"
    )
    run.root.chmod(0o755)
    (run.root / ".tmp").chmod(0o755)
    goes_on(run, objects)


def test_error_names_a_missing_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with s3_server("gone") as endpoint:
        use(endpoint, monkeypatch)
        run = S3Store("gone/run")
        policies, writer = started(run)
        version = policies.find(0)
        s3fs.S3FileSystem(skip_instance_cache=True).rm("gone", recursive=True)
        works: list[Callable[[], object]] = [
            lambda: publish(policies, writer),
            lambda: policies.find(0),
            lambda: policies.weights_folder(version, tmp_path),
            lambda: Log(run),
            lambda: run.create("a", b""),
        ]
        for work in works:
            with pytest.raises(
                ConfigError, match="'s3://gone/run' names a bucket that does not exist; create 'gone' or"
            ):
                work()
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_skewed_clock_gives_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("clock") as endpoint, FaultyProxy(endpoint) as proxy:
        use(proxy.endpoint, monkeypatch)
        proxy.answer("PUT", 403, "RequestTimeTooSkewed")
        with pytest.raises(
            ConfigError,
            match=r"'s3://clock/run' refuses requests because this machine's clock is wrong .*; set the clock, then",
        ):
            S3Store("clock/run").put("a", b"")


def test_clock_jump_of_hours_restarts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decision of a run depends on the wall clock: the run finishes, its audit is clean, and the same objects are
    kept.
    """
    straight, real = MemoryStore(uuid.uuid4().hex), time.time
    run_virtual(Pipeline(straight, versions=12).run())
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice((-3600.0, 0.0, 3600.0)))
    jumping = MemoryStore(uuid.uuid4().hex)
    run_virtual(Pipeline(jumping, versions=12).run())
    report = audit(jumping, deep=True)
    assert report.violations == []
    assert report.trajectories == audit(straight).trajectories
    assert kept(jumping) == kept(straight)


def kept(run: ObjectStore) -> set[int]:
    policies = PolicyStore(Log(run))
    return {v for v in range(policies.newest() + 1) if run.exists(policies.find(v).weights[0].path)}


def test_run_in_another_storage_format_is_refused(tmp_path: Path) -> None:
    logged, described = LocalStore(tmp_path / "logged"), LocalStore(tmp_path / "described")
    Log(logged).create(RunCreated("another", {"async_ratio": 0, "group_size": 1}, "0" * 64, 1, format=FORMAT + 1))
    described.put("run.json", b"{}")
    for store, number in ((logged, FORMAT + 1), (described, 0)):
        formats = f"has format {number}, and this release of rollflow reads format {FORMAT}"
        with pytest.raises(ConfigError, match=rf"^run '{store.uri}' {formats}; use the release that recorded it$"):
            _ = RunContext(store.uri, tmp_path / "cache").config
