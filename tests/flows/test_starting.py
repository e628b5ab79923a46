"""Tests that only one command controls a run, that a run obeys a stop request, and that its status is true from start
to end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.commands import run as run_command
from rollflow.flows.commands.cli import main
from rollflow.flows.keepalive.run_watch import RunWatch
from rollflow.flows.locations import find_run, run_home
from rollflow.flows.services.run_lock import find_holder, hold_run
from rollflow.flows.views.last_status import read_last_status, save_last_status
from rollflow.flows.views.status import STATUS, RunStatus, StageStatus, read_status, record_end
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.stop_requests import RunEnded, read_request, request_stop, take_back
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

HOLD = """
import sys, time
from rollflow.flows.locations import find_run, run_home
from rollflow.flows.services.run_lock import hold_run
with hold_run(run_home(), find_run("one")):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Make a run that was stopped at version 3 of 9."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROLLFLOW_STORE", str(tmp_path / "store"))
    describe(open_store(f"{tmp_path}/store/runs/one"), "one")
    context = find_run("one")
    tell(context, RunStatus("one", "stopped", 3, 9, seconds=1.0))
    return context


def tell(context: RunContext, status: RunStatus) -> None:
    context.store.put(STATUS, status.to_json().encode())


def test_second_resume_is_refused_with_the_name_of_the_run(
    run: RunContext, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[str] = []
    monkeypatch.setattr(run_command, "drive", lambda context: driven.append(context.uri) or 0)
    monkeypatch.setattr(RunContext, "prompts", lambda _: None)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        assert find_holder(run_home(), run) == str(first.pid)
        assert main(["resume", "one"]) == 2
        said = capsys.readouterr().err
        assert f"run one is already running, started by another command of {Path(run.uri).parents[2] / 'home'}" in said
        assert f"(process {first.pid})" in said
        assert driven == []
        first.send_signal(signal.SIGKILL)
    assert find_holder(run_home(), run) is None
    assert main(["resume", "one"]) == 0
    assert driven == [run.uri]


def test_only_one_command_of_a_run_home_controls_a_run(run: RunContext) -> None:
    with hold_run(run_home(), run), pytest.raises(ConfigError, match="is already running"), hold_run(run_home(), run):
        pass
    with hold_run(run_home(), run):
        pass


def drive(run: RunContext, monkeypatch: pytest.MonkeyPatch, session: Any) -> int:
    monkeypatch.setattr(run_command, "session_of", contextlib.contextmanager(session))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return run_command.drive(run)


def test_stop_request_during_start_is_obeyed(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request from before the run's start is ignored; a later stop request is obeyed."""
    began: list[float] = []
    request_stop(run.store, "stop")

    def session(context: RunContext) -> Iterator[Any]:
        assert read_request(context.store) is None
        assert main(["stop", "one", "--no-wait"]) == 0
        yield SimpleNamespace(page="", login="", submit=lambda _, at: began.append(at), follow=lambda *_: [status])

    status = RunStatus("one", "stopped", 3, 9)
    assert drive(run, monkeypatch, session) == run_command.INTERRUPTED
    asked = read_request(run.store)
    assert asked is not None
    take_back(run.store, began[0])  # the supervisor removes requests from before the request for its flow run
    assert read_request(run.store) == asked


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_stop_ends_a_run_before_its_stages_begin(run: RunContext, how: Any) -> None:
    writer: Any = SimpleNamespace(context=run, progress=SimpleNamespace(version=3), messages=[])
    following = RunWatch(SimpleNamespace(), writer, SimpleNamespace())  # type: ignore[arg-type]
    following.heed_before()
    request_stop(run.store, how)
    with pytest.raises(RunEnded, match=f"the run ended while it was starting, because of `rollflow {how}`"):
        following.heed_before()


def test_run_fails_if_its_services_do_not_start(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str | None] = []

    def session(context: RunContext) -> Iterator[Any]:
        status = read_status(context)
        phases.append(status.phase if status else None)
        raise Unreachable("the Prefect server does not start")
        yield

    with pytest.raises(Unreachable):
        drive(run, monkeypatch, session)
    status = read_status(run)
    assert status is not None
    assert phases == ["starting"]
    assert (status.phase, status.version) == ("failed", 3)
    assert status.messages == ("the Prefect server does not start",)


def test_failed_run_shows_no_running_stage(
    run: RunContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a supervisor could not record the run's end, the command that started the run records it."""
    stages = {"rollout": StageStatus("Running", "version 3"), "reward": StageStatus("Completed")}

    def session(context: RunContext) -> Iterator[Any]:
        tell(context, RunStatus("one", "training", 4, 9, stages=stages))
        last = RunStatus("one", "failed", 4, 9, messages=("the learner died",))
        yield SimpleNamespace(page="", login="", submit=lambda *_: None, follow=lambda *_: [last])

    assert drive(run, monkeypatch, session) == 1
    capsys.readouterr()
    assert main(["status", "one"]) == 0
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert "the learner died" in printed
    assert "running" not in printed.lower()


@pytest.fixture
def silent() -> Iterator[int]:
    """Return the port of a service that accepts connections and answers nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


SILENT = ["status", "s3://bucket/runs/one"]


def status_of(home: Path, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    env = {**os.environ, **keys, "ROLLFLOW_HOME": str(home), "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", *SILENT, *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


@pytest.mark.long
def test_status_command_works_without_the_object_store(tmp_path: Path, silent: int) -> None:
    new, known = tmp_path / "new", tmp_path / "known"
    save_last_status(known, "s3://bucket/runs/one", RunStatus("one", "training", 4, 9))
    with ThreadPoolExecutor() as pool:  # each command waits for six seconds
        asked = [
            pool.submit(status_of, *given) for given in ((new, silent), (known, silent), (known, silent, "--json"))
        ]
    nothing, printed, parsed = (one.result() for one in asked)
    assert nothing.returncode == 1
    assert "did not answer within 6 s; this machine has seen nothing of the run" in nothing.stderr
    assert printed.returncode == 0
    assert "did not answer within 6 s" in printed.stderr
    assert "ago its state was" in printed.stderr
    assert "4 / 9" in printed.stdout
    assert RunStatus.from_json(parsed.stdout).version == 4


def test_status_without_a_name_shows_the_newest_run(tmp_path: Path) -> None:
    assert read_last_status(tmp_path, None) is None
    save_last_status(tmp_path, "s3://bucket/runs/one", RunStatus("one", "training", 4, 9))
    os.utime(next((tmp_path / "seen").iterdir()), (0, 0))
    save_last_status(tmp_path, "s3://bucket/runs/two", RunStatus("two", "training", 5, 9))
    newest, one = read_last_status(tmp_path, None), read_last_status(tmp_path, "s3://bucket/runs/one/")
    assert newest is not None
    assert one is not None
    assert (newest.status.run_id, one.status.run_id) == ("two", "one")
    save_last_status(tmp_path, "s3://other/runs/three", RunStatus("three", "training", 6, 9))
    within = read_last_status(tmp_path, None, "s3://bucket")
    assert within is not None
    assert within.status.run_id == "two"
    assert read_last_status(tmp_path, None, "s3://empty") is None


def test_run_home_without_file_locks_is_refused(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("rollflow.flows.services.locks.fcntl.flock", without)
    words = r"cannot be locked \(No locks available\); set ROLLFLOW_HOME"
    with pytest.raises(ConfigError, match=words), hold_run(run_home(), run):
        pass


def test_age_of_a_status_starts_at_its_last_change(run: RunContext) -> None:
    """The age is the time since the status was written, not since it was last read, so that a silent run does not seem
    alive.
    """
    tell(run, RunStatus("one", "training", 4, 9))
    os.utime(Path(run.uri) / STATUS, (0, 0))
    assert main(["status", "one"]) == 0
    seen = read_last_status(run_home(), run.uri)
    assert seen is not None
    assert seen.age > 1e9


@pytest.mark.parametrize(("phase", "told"), [("training", True), ("failed", False), ("paused", False)])
def test_status_command_reports_a_silent_run(
    run: RunContext, phase: Any, capsys: pytest.CaptureFixture[str], *, told: bool
) -> None:
    """This simulates a machine that lost power: nobody has recorded the end of the run."""
    tell(run, RunStatus("one", phase, 4, 9))
    assert main(["status", "one"]) == 0
    assert "its last status is" not in capsys.readouterr().out
    os.utime(Path(run.uri) / STATUS, (0, 0))
    assert main(["status", "one"]) == 0
    assert ("its last status is" in capsys.readouterr().out) == told


def test_recorded_end_of_a_run_is_not_overwritten(run: RunContext) -> None:
    record_end(run, "failed", "later")
    status = read_status(run)
    assert status is not None
    assert (status.phase, status.messages) == ("stopped", ())
