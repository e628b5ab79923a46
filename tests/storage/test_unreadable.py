"""Tests that an unreadable file does not count as missing, for example if a process has no free file descriptor."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollflow.storage.errors import ConfigError, Corrupt, StoreFailed, Unreachable
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.objects.s3_requests import RetryLimits
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.trajectories import TrajectoryStore
from tests.support.batches import begin, file_of, learning, scheduling, staged
from tests.support.faulty_proxy import FaultyProxy
from tests.support.s3_server import use

WEIGHTS = {"weights/a.safetensors": b"a" * 1000, "weights/b.safetensors": b"b" * 1000}

OUT_OF_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyStore
from rollflow.storage.trajectories import TrajectoryStore

run = open_store(sys.argv[1])
log = Log(run)
batches, policies, writer = TrajectoryStore(log), PolicyStore(log), Writer(log, "scheduler", int(sys.argv[2]))
version, waiting = policies.find(0), batches.find_waiting(0)
calls = {
    "read": lambda: batches.read(waiting.file),
    "void": lambda: batches.void(writer, 0, "cannot be read"),
    "entry": lambda: batches.read_commit(waiting.entry),
    "log": lambda: Log(run).state,
    "weights": lambda: policies.read(version.weights[0]),
    "folder": lambda: PolicyStore(log).weights_folder(version, Path(sys.argv[1]) / "cache"),
    "list": lambda: run.list("trajectories"),
}
for call in calls.values():
    call()  # all that is imported late is there now
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
found = {}
for name, call in calls.items():
    try:
        found[name] = repr(call())
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
for descriptor in held:
    os.close(descriptor)
for name, what in found.items():
    print(name, what)
"""


def committed(run: ObjectStore) -> tuple[TrajectoryStore, Writer, PolicyVersion]:
    """Create a run with a policy version of two weight files and a waiting batch; return the scheduler's view of the
    run.
    """
    begin(run)
    policies, learner = learning(run)
    weights = policies.stage(learner, 0, WEIGHTS)
    state = policies.stage(learner, 0, {"learner/state.safetensors": b"s"})
    version = policies.publish(learner, VersionPublished(0, None, weights, state))
    batches, writer = scheduling(run)
    batches.commit(writer, staged())
    return batches, writer, version


def test_process_without_file_descriptors_voids_no_batch(tmp_path: Path) -> None:
    run = open_store(str(tmp_path))
    batches, writer, _ = committed(run)
    command = [sys.executable, "-c", OUT_OF_DESCRIPTORS, str(tmp_path), str(writer.claim)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    assert found.keys() == {"read", "void", "entry", "log", "weights", "folder", "list"}
    for what in found.values():
        assert what.startswith("Unreachable: "), found
        assert "Too many open files" in what
    is_whole(batches)


def is_whole(batches: TrajectoryStore) -> None:
    """Return whether no batch was voided and the batch can be read."""
    assert batches.read(file_of(batches, 0)).size > 0
    assert batches.log.state.voids == 0


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENFILE, errno.EIO, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("what", ["open", "pyarrow", "stat"])
def test_unreadable_file_counts_as_unreachable_not_corrupt(
    code: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_store(str(tmp_path))
    batches, writer, version = committed(run)
    policies, file = PolicyStore(Log(run)), file_of(batches, 0)
    with monkeypatch.context() as trouble:
        match what:
            case "open":
                trouble.setattr("builtins.open", failing(code))
                trouble.setattr("io.open", failing(code))
                calls = [lambda: batches.read_commit(0), lambda: Log(run), lambda: policies.read(version.weights[0])]
            case "pyarrow":
                trouble.setattr(pa, "memory_map", failing(code))
                calls = [lambda: batches.read(file), lambda: batches.void(writer, 0, "cannot be read")]
            case _:
                trouble.setattr(os, "stat", failing(code))
                calls = [lambda: batches.read(file), lambda: run.exists("a"), lambda: Log(run)]
        for call in calls:
            with pytest.raises(Unreachable, match="cannot be read now"):
                call()
    is_whole(batches)


@pytest.mark.parametrize("damage", ["gone", "empty", "folder"])
def test_missing_batch_file_is_quarantined(damage: str, tmp_path: Path) -> None:
    run = open_store(str(tmp_path))
    batches, writer, _ = committed(run)
    file = file_of(batches, 0)
    path = tmp_path / file.path
    path.unlink()
    if damage == "empty":
        path.touch()
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(
        Corrupt, match="does not have the content that its log entry names" if damage == "empty" else "is missing"
    ):
        batches.read(file)
    assert batches.void(writer, 0, "it is damaged")
    assert batches.log.state.voids == 1


def test_full_disk_and_unreadable_source_give_different_errors(tmp_path: Path) -> None:
    """The method `fetch` reads one file and writes another file. The error depends on which of the two files fails."""
    run = open_store(str(tmp_path / "run"))
    run.put("a", b"x" * 10)
    with pytest.raises(StoreFailed, match="No space left"):
        run_fetch_to_full(run)


def run_fetch_to_full(run: ObjectStore) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = open

    def opened(file: Any, mode: str = "r", **named: Any) -> Any:
        return Full() if mode == "xb" else real(file, mode, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", opened)
        run.fetch("a", Path(f"/nowhere/{uuid.uuid4().hex}"))


def test_local_file_error_is_not_an_s3_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable certificate file does not make an object missing."""
    store = S3Store("bucket/run")
    monkeypatch.setattr(S3Store, "_call", failing(errno.ENOENT))
    with pytest.raises(Unreachable, match="No such file"):
        store.exists("a")


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "XMinioServerNotInitialized"), (503, "SlowDownRead"), (500, "XMinioBackendDown"), (504, "")],
)
def test_unknown_error_code_of_a_busy_s3_is_retried(status: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.storage.objects.s3_requests.PATIENT", RetryLimits(tries=3, pause_seconds=0.01))
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        use(proxy.endpoint, monkeypatch)
        store = S3Store("bucket/run")
        for method, ask in (("GET", store.get), ("HEAD", store.exists), ("PUT", lambda path: store.put(path, b""))):
            proxy.answer(method, status, code)
            with pytest.raises(Unreachable, match="did not answer a request for"):
                ask("a")
            assert proxy.seen(method) >= 3


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "AuthorizationHeaderMalformed")])
def test_permanent_s3_error_is_not_retried(status: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        use(proxy.endpoint, monkeypatch)
        proxy.answer("GET", status, code)
        with pytest.raises(OSError):
            S3Store("bucket/run", patience=1.0).get("a")
        assert proxy.seen("GET") == 1


def test_wrong_s3_region_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        use(proxy.endpoint, monkeypatch)
        proxy.answer("PUT", 400, "AuthorizationHeaderMalformed")
        with pytest.raises(ConfigError, match=r"s3://bucket/run' refuses .*AuthorizationHeaderMalformed.* AWS_REGION"):
            S3Store("bucket/run").check()
