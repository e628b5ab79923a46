"""Tests that services start, answer, and never outlive the process that started them, and that bad addresses get a
one-sentence error.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollflow.flows.ray_cluster import ray_head
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.services.process import (
    MlflowServer,
    PrefectServer,
    Runner,
    free_port,
    start_together,
    stop_together,
)
from rollflow.flows.services.reachability import check_mlflow, check_prefect, check_ray, redact
from rollflow.storage.errors import ConfigError, Unreachable
from tests.support.prefect_home import give
from tests.support.waiting import RUN_SECONDS, until

MARK = "ROLLFLOW_TEST_MARK"
CLIENT = """
import os, subprocess, sys, time
import ray
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import EngineFailed, Unreachable
import signal
mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
cluster.attach(sys.argv[1], "test")
assert signal.getsignal(signal.SIGTERM) is mine

@ray.remote(num_cpus=0)
class Actor:
    def spawn(self):  # as an engine does: a child in a session of its own
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    def hang(self):
        time.sleep(600)
    def fail(self):
        raise EngineFailed("wrong weights")

actor = Actor.options(name="kept", lifetime="detached").remote()
cluster.call_within(actor.spawn.remote(), 150, "a child, from the actor")
assert cluster.find_actor("kept") is not None
try:
    cluster.call_within(actor.fail.remote(), 150, "a failure")
except EngineFailed as error:
    print(error)
try:
    cluster.call_within(actor.hang.remote(), 0.2, "an answer, from the actor")
except Unreachable as error:
    print(error)
class Cancelled(BaseException):  # as Prefect's of a flow run
    pass
def cancel(*_):
    raise Cancelled("told to end")
signal.signal(signal.SIGALRM, cancel)
for wait in (cluster.has_ended, lambda hangs, seconds: cluster.call_within(hangs, seconds, "an answer")):
    signal.alarm(1)
    try:
        wait(actor.hang.remote(), 2)
    except Cancelled as error:
        print(error)
try:
    cluster.find_actor("nobody")
except Unreachable as error:
    print(error)
other = Actor.options(name="other").remote()
cluster.call_within(other.spawn.remote(), 150, "a child, from the other")
waiting = other.hang.remote()
print(cluster.kill_named(["other", "nobody"]))
try:
    cluster.call_within(waiting, 150, "an answer, from the other", died=EngineFailed)
except EngineFailed as error:
    print("dead:", error)
"""


def marked(mark: str) -> list[int]:
    """Return the living processes that carry the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def lines(mark: str) -> list[bytes]:
    """Return the command lines of the marked processes."""
    found = []
    for pid in marked(mark):
        with contextlib.suppress(OSError):  # the process has just ended
            found.append(Path("/proc", str(pid), "cmdline").read_bytes())
    return found


def sleepers(mark: str) -> list[bytes]:
    """Return the marked children of the test's actors."""
    return [line for line in lines(mark) if b"sleep" in line]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark every process of the test, and end processes that a failing test leaves behind."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_prefect_and_ray_leave_no_process_behind(tmp_path: Path, prefect_database: Path, mark: str) -> None:
    deep = tmp_path / "a-folder-whose-name-is-too-long-for-the-sockets-of-ray"
    give(prefect_database, deep)
    prefect, ray = PrefectServer(deep), RayHead(deep, cpus=2)
    start_together(prefect, ray)
    try:
        check_prefect(prefect.api_url)
        check_ray(ray.address)
        with pytest.raises(
            ConfigError, match=r"PREFECT_API_URL = .* the server at this address is not a Prefect API .*ends in /api"
        ):
            check_prefect(prefect.ui_url + "/nothing")
        with pytest.raises(ConfigError, match="the server at this address is not a Ray head"):
            check_ray(prefect.ui_url.removeprefix("http://"))
        command = [sys.executable, "-c", CLIENT, ray.address]
        client = subprocess.run(
            command, env=os.environ | ray.env, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        assert client.returncode == 0, client.stderr
        assert client.stdout.splitlines()[:6] == [
            "wrong weights",
            "no answer came within 0.2 s, while waiting for an answer, from the actor",
            "told to end",
            "told to end",
            "the Ray cluster has no actor with the name 'nobody' in the namespace 'test'",
            "['other']",
        ]
        assert client.stdout.splitlines()[6].startswith(
            "dead: cannot wait for an answer, from the other, because its process is gone"
        )
        assert client.stderr == ""
        # the detached actor's child is left; the killed actor's child ended with the actor
        until(lambda: len(sleepers(mark)) == 1)
    finally:
        stop_together(prefect, ray)
    until(lambda: not marked(mark))
    prefect.stop()  # a second `stop` does nothing


def asked(url: str, auth: str | None, body: bytes | None = None) -> int:
    """Return the status of an HTTP answer."""
    headers = {"Content-Type": "application/json"}
    if auth is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_private_prefect_server_requires_its_secret(
    tmp_path: Path, prefect_database: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of a machine can reach its loopback, and a deployment's entrypoint is code."""
    give(prefect_database, tmp_path)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of another server")
    server, other = PrefectServer(tmp_path), PrefectServer(tmp_path / "other")
    orders = [(f"{server.api_url}/flows/", b'{"name": "mine"}'), (f"{server.api_url}/deployments/filter", b"{}")]
    orders += [(f"{server.api_url}/admin/version", None), (f"{server.api_url}/x/../flows/filter", b"{}")]
    with server:
        auth = server.auth_file.read_text()
        assert server.env["PREFECT_API_AUTH_STRING"] == auth != other.env["PREFECT_API_AUTH_STRING"]
        assert stat.S_IMODE(server.auth_file.stat().st_mode) == 0o600
        for url, body in orders:
            for wrong in (None, "", "of another server", auth[:-1], f"{auth}x"):
                assert asked(url, wrong, body) == 401, (url, wrong)
        assert [asked(url, auth, body) for url, body in orders[:3]] == [201, 200, 200]
        assert asked(f"{server.api_url}/health", None) == 200
        assert server.running
        server.kill()
        server.restart()
        assert asked(orders[1][0], auth, b"{}") == 200  # clients of the restarted server keep using the same secret
        lines = [Path("/proc", str(pid), "cmdline").read_text() for pid in marked(mark)]
        assert len(lines) > 1
        secret = auth.partition(":")[2]
        assert not [line for line in lines if secret in line]
    assert not server.auth_file.exists()
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert kept == []  # no log, profile or database contains the secret


def test_ray_actors_do_not_get_the_prefect_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors run models and verifiers, which must not be able to use the Prefect server."""
    for name, value in PrefectServer(tmp_path).env.items():
        monkeypatch.setenv(name, value)
    for service in (RayHead(tmp_path), MlflowServer(tmp_path)):
        assert not [name for name in service._environment() if name.startswith("PREFECT_")]


@pytest.mark.slow
def test_mlflow_server_starts_without_job_processes(tmp_path: Path, mark: str) -> None:
    """MLflow's jobs are eight processes beside the server; no job exists a while after the server has answered."""
    with MlflowServer(tmp_path):
        for _ in range(10):
            assert len(lines(mark)) > 1
            assert not [line for line in lines(mark) if b"jobs" in line or b"huey" in line]
            time.sleep(0.2)


@pytest.mark.slow
def test_services_end_when_their_parent_process_is_killed(tmp_path: Path, mark: str) -> None:
    owner_code = """
import sys, threading, time
from pathlib import Path
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.services.process import Runner
head = RayHead(Path(sys.argv[1]), cpus=1)
thread = threading.Thread(target=head.start)  # a service does not end with the thread that started it
thread.start()
thread.join()
Runner(Path(sys.argv[1]) / "runner.log", {}, module="http.server", arguments=["0", "--bind", "127.0.0.1"]).start()
time.sleep(1)
print("up" if head.running else "down", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", owner_code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    assert len(marked(mark)) >= 7
    owner.kill()
    owner.wait()
    until(lambda: not marked(mark))


@pytest.mark.soak
@pytest.mark.slow
def test_ray_cluster_restarts_at_its_old_address(tmp_path: Path, mark: str) -> None:
    """The cluster's guards are killed, as the kernel may do when memory is short."""
    head = RayHead(tmp_path, cpus=1)
    head.start()
    try:
        token = (head.folder / "token").read_text()
        assert head._process is not None
        head._process.kill()
        until(lambda: not head.running)
        head.restart()
        assert len([line for line in lines(mark) if b"gcs_server" in line]) == 1
        # the token is unchanged, because the cluster's clients have read it
        assert (head.folder / "token").read_text() == token
        for pid in marked(mark):  # both guards are killed at once; Ray's processes end with their parent process
            if b"guard.py" in Path("/proc", str(pid), "cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        until(lambda: not marked(mark))
    finally:
        head.stop()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:  # an orphan in a session of its own that ignores SIGTERM, and so does this process
    subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.Popen({[sys.executable, __file__, 'orphan']!r}, start_new_session=True)"]).wait()
open("ready", "w").close()
time.sleep(600)
"""  # noqa: E501


def test_stop_kills_orphan_processes_that_ignore_sigterm(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.chdir(tmp_path)
    env = {"PYTHONPATH": str(tmp_path)}
    runner = Runner(tmp_path / "log", env, module="stubborn", ready=tmp_path / "ready", grace_seconds=0.3)
    with runner:
        until(lambda: len(marked(mark)) == 4)  # two guards, process, orphan
        runner.stop()
        assert not runner.running
    until(lambda: not marked(mark))


@pytest.mark.parametrize("owner_too", [False, True], ids=["guard", "guard and owner"])
def test_child_processes_of_a_killed_guard_process_are_ended(tmp_path: Path, mark: str, owner_too: bool) -> None:
    owner_code = f"""
import sys, time
from pathlib import Path
from rollflow.flows.services.process import Runner
runner = Runner(Path("log"), {{"PYTHONPATH": {os.pathsep.join([str(tmp_path), *sys.path])!r}}}, module="stubborn", ready=Path("ready"), grace_seconds=0.3)
runner.start()
print(runner._process.pid, flush=True)
time.sleep(600)
"""  # noqa: E501
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", owner_code]
    owner = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    guard = int(owner.stdout.readline())
    until(lambda: len([line for line in lines(mark) if b"guard.py" not in line]) == 3)  # owner, process, orphan
    for pid in [guard, owner.pid] if owner_too else [guard]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: marked(mark) == [owner.pid] or not marked(mark))
    owner.kill()
    owner.wait()


def test_error_names_a_service_that_ended_and_its_log(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", {}, module="no_such_module", ready=tmp_path / "ready")
    with pytest.raises(Unreachable, match=rf"ended while it was starting \(exit code 1\); see {tmp_path}/log"):
        runner.start()
    assert "no_such_module" in (tmp_path / "log").read_text()


def test_service_that_is_not_ready_by_its_deadline_is_an_error(tmp_path: Path, mark: str) -> None:
    arguments = ["0", "--bind", "127.0.0.1"]
    runner = Runner(
        tmp_path / "log", {}, module="http.server", arguments=arguments, ready=tmp_path / "ready", start_seconds=0.5
    )
    with pytest.raises(Unreachable, match=r"did not answer within [01] s after its start"):
        runner.start()
    until(lambda: not marked(mark))


def test_closed_port_gets_a_one_sentence_error() -> None:
    port = free_port()
    cases = [
        (check_prefect, f"http://me:hidden@127.0.0.1:{port}/api", "PREFECT_API_URL", "unset PREFECT_API_URL"),
        (check_mlflow, f"http://me:hidden@127.0.0.1:{port}", "tracking.uri", "SQLite in the run home"),
        (check_mlflow, f"postgresql://me:hidden@127.0.0.1:{port}/mlflow", "tracking.uri", "SQLite in the run home"),
        (check_ray, f"127.0.0.1:{port}", "cluster.address", '"auto" for a private cluster'),
    ]
    for check, value, key, cure in cases:
        with pytest.raises(ConfigError) as caught:
            check(value)
        sentence = str(caught.value)
        assert sentence.startswith(f"{key} = ")
        assert str(port) in sentence
        assert "Connection refused" in sentence
        assert cure in sentence
        assert "hidden" not in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "localhost", "host:port", ":6379"])
def test_invalid_ray_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of a Ray head"):
        check_ray(address)


def test_connection_to_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.flows.services.reachability.CHECK_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for check, value in [(check_prefect, f"http://127.0.0.1:{port}/api"), (check_ray, f"127.0.0.1:{port}")]:
            with pytest.raises(ConfigError, match="does not answer"):
                check(value)


def test_server_that_asks_for_credentials_is_accepted() -> None:
    class Guarded(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        check_mlflow(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


def test_local_tracking_store_must_be_writable(tmp_path: Path) -> None:
    check_mlflow(f"sqlite:///{tmp_path}/new/folder/mlflow.db")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        check_mlflow(f"sqlite:///{tmp_path}/file/mlflow.db")


def test_redacted_url_keeps_scheme_host_and_path() -> None:
    assert redact("http://user:pw@host:5000/path?token=x#y") == "http://host:5000/path"
    assert redact("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert redact("host:6379") == "host:6379"
    assert redact("http:///user:pw@host:1?token=x") == redact("http:user:pw@host:1") == "http:host:1"


def test_long_path_of_the_ray_folder_is_replaced_by_a_short_link(tmp_path: Path) -> None:
    assert ray_head.short_folder(Path("/short")) == Path("/short")
    long = tmp_path / ("x" * 60)
    assert len(str(ray_head.short_folder(long))) < 41


def test_newest_folders_of_dead_ray_processes_are_kept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in range(4):
        (tmp_path / f"{dead.pid}-{number}").mkdir()
        os.utime(tmp_path / f"{dead.pid}-{number}", (number, number))
    (tmp_path / f"{os.getpid()}-1").mkdir()
    ray_head.remove_dead_folders(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"{dead.pid}-2", f"{dead.pid}-3", f"{os.getpid()}-1"])


def test_links_of_dead_ray_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    parent = tmp_path / "ray"
    for name, owner in (("dead", dead.pid), ("living", os.getpid())):
        (parent / f"{owner}-1").mkdir(parents=True)
        (tmp_path / f"rollflow-{name}").symlink_to(parent / f"{owner}-1")
    (tmp_path / "rollflow-nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "rollflow-file").touch()
    ray_head.remove_dead_links(parent)
    assert sorted(path.name for path in tmp_path.glob("rollflow-*")) == ["rollflow-file", "rollflow-living"]


def test_symbolic_links_of_other_users_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(f"{path} is in a folder of another user")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "rollflow-other").symlink_to("/root/of/another/ray/1-1")
    monkeypatch.setattr(Path, "exists", forbidden)
    ray_head.remove_dead_links(tmp_path / "ray")
    assert (tmp_path / "rollflow-other").is_symlink()


def test_importing_services_loads_no_large_library() -> None:
    code = """
import sys
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.services import guard, reachability, process as services
from rollflow.flows.tracking import tracking
from rollflow.flows.views import console, status
from rollflow.flows.commands import doctor
print([name for name in ("prefect", "ray", "mlflow", "torch", "vllm", "matplotlib") if name in sys.modules])
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
