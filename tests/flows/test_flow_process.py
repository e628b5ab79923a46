"""Tests that a forked flow run behaves like one in a new interpreter, and that it ends with its runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollflow.flows.services.process_title import flow_run_of
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="only there are flow runs forked")]

# This module replaces Prefect's engine, which needs a server: it reports what it sees, then waits or ends as requested.
ENGINE = """
import atexit, json, os, pathlib, signal, sys, time
import heavy
atexit.register(lambda: print("at its end", os.environ["PREFECT__FLOW_RUN_ID"], flush=True))
seen = {"pid": os.getpid(), "server": os.getppid(), "main": __name__, "arguments": sys.argv, "folder": os.getcwd(),
        "imported_by": heavy.PID, "secret": os.environ.get("ONLY_OF_THE_RUNNER"),
        "ends": [signal.getsignal(one) == signal.default_int_handler for one in (signal.SIGTERM, signal.SIGINT)]}
pathlib.Path(os.environ["TELL"]).write_text(json.dumps(seen))
time.sleep(float(os.environ["SLEEP"]))
sys.exit(7)
"""
RUNNER = """
import json, os, sys, time
from multiprocessing import spawn
from rollflow.flows.services import flow_process
flow_process.ENGINE = "their_engine"  # before it is copied
import anyio
from prefect.runner import _starter_engine
import heavy
prepare = spawn.prepare
def slowly(data):
    time.sleep(float(os.environ.get("SLOW", 0)))
    prepare(data)
spawn.prepare = slowly
flow_process.fork_flows("heavy")

class Told:
    def started(self, process):
        print("started", process.pid, flush=True)

async def one(given):
    how = {"command": [sys.executable, "-m", "their_engine"], "stream_output": True}
    ended = await _starter_engine.run_process(**how, task_status=Told(), task_status_handler=lambda one: one, **given)
    print("ended", ended.pid, ended.exitcode, flush=True)

async def all():
    async with anyio.create_task_group() as group:
        async for line in anyio.wrap_file(sys.stdin):
            group.start_soon(one, json.loads(line))

anyio.run(all)
"""


class Forking:
    """A runner that forks a flow run for each input line, and reports it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "heavy.py").write_text("import os\nPID = os.getpid()\n")
        (folder / "their_engine.py").write_text(ENGINE)
        path = os.pathsep.join([str(folder), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, "its arguments leave room for another command line: " + "x" * 200],
            env=os.environ | {"PYTHONPATH": path, "PREFECT_HOME": str(folder), "ONLY_OF_THE_RUNNER": "yes"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str, seconds: float) -> None:
        environment = {
            "PREFECT__FLOW_RUN_ID": name, "TELL": str(self.folder / name), "SLEEP": str(seconds),
            "PATH": os.environ["PATH"], "PREFECT_HOME": str(self.folder), "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"env": environment, "cwd": str(self.folder)}) + "\n")
        self.process.stdin.flush()

    def seen(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        until(lambda: file.exists() and file.read_text())
        return dict(json.loads(file.read_text()))

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Forking]:
    forking = Forking(tmp_path)
    yield forking
    forking.process.kill()
    forking.process.communicate()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_forked_flow_run_behaves_like_a_new_interpreter(runner: Forking, tmp_path: Path) -> None:
    runner.ask("first", 0.5)
    seen = runner.seen("first")
    assert seen["imported_by"] == runner.process.pid  # the flow run uses the runner's imports
    assert seen["main"] == "__main__"
    assert len(seen["arguments"]) == 1  # Prefect would read a second argument as a flow run's id
    assert seen["folder"] == str(tmp_path)
    assert seen["secret"] is None  # the flow run has only the environment of its own request
    # False for a background job of a shell, which ignores SIGINT
    heard = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert seen["ends"] == [False, heard]  # the signal handlers are Python's, not those of the fork server
    told = [runner.line() for _ in range(3)]
    assert told == [
        ["started", str(seen["pid"])],
        ["at", "its", "end", "first"],
        ["ended", str(seen["pid"]), "7"],
    ]


def test_process_title_names_the_flow_run(runner: Forking) -> None:
    runner.ask("an-id", 600)
    process = psutil.Process(runner.seen("an-id")["pid"])
    assert process.cmdline()[:4] == [sys.executable, "-m", "their_engine", "an-id"]
    assert flow_run_of(process) is None  # the process does not run Prefect's own engine
    assert process.environ()["ONLY_OF_THE_RUNNER"] == "yes"  # the processes of a run home are found by such a variable
    assert "-m multiprocessing.forkserver" in " ".join(process.parent().cmdline())


def test_killed_flow_run_is_reported_as_killed(runner: Forking) -> None:
    runner.ask("killed", 600)
    pid = runner.seen("killed")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert [runner.line() for _ in range(2)] == [["started", str(pid)], ["ended", str(pid), "-9"]]


def test_flow_run_ends_with_its_fork_server(runner: Forking) -> None:
    runner.ask("orphan", 600)
    seen = runner.seen("orphan")
    assert runner.line()[0] == "started"
    os.kill(seen["server"], signal.SIGKILL)
    ended = runner.line()
    assert ended[:2] == ["ended", str(seen["pid"])]
    assert ended[2] != "0"
    until(lambda: gone(seen["pid"]))
    # the second fork server is a new interpreter, so it needs the patch
    (runner.folder / "sitecustomize.py").write_text(
        'import sys\nif "-c" in sys.orig_argv:\n'
        '    from rollflow.flows.services import flow_process\n    flow_process.ENGINE = "their_engine"\n'
    )
    runner.ask("next", 0)
    after = runner.seen("next")
    assert after["server"] not in (seen["server"], runner.process.pid)
    assert runner.line() == ["started", str(after["pid"])]


def test_flow_run_ends_if_its_fork_server_died_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW", "1")
    runner = Forking(tmp_path)
    runner.ask("late", 3)
    pid = int(runner.line()[1])
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    assert runner.line()[0] == "ended"  # the runner counts the flow run as ended and would start it a second time
    until(lambda: gone(pid))
    assert not (tmp_path / "late").exists()
    runner.process.kill()
    runner.process.communicate()


def test_flow_run_ends_with_its_runner(runner: Forking) -> None:
    runner.ask("left", 600)
    seen = runner.seen("left")
    runner.process.kill()
    until(lambda: gone(seen["pid"]) and gone(seen["server"]))
