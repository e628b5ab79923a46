"""Tests that all commands of a run home share one Prefect server at a stable address, and find the servers of `rollflow
serve`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollflow.flows.commands.serve import requested_addresses
from rollflow.flows.services import stack
from rollflow.flows.services.home_server import POLL_SECONDS, HomeServer, read_addresses, stable_port, store_addresses
from rollflow.flows.services.locks import take
from rollflow.flows.services.process import free_port
from rollflow.flows.services.profile import prefect_url
from rollflow.flows.services.reachability import http_answers
from rollflow.storage.errors import ConfigError
from tests.support.prefect_home import give
from tests.support.waiting import HANG_SECONDS, until

FIRST = """
import sys
import time
from pathlib import Path
from rollflow.flows.services.home_server import HomeServer
server = HomeServer(Path(sys.argv[1]))
server.start()
print(server.api_url, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_commands_of_one_run_home_share_a_prefect_server(tmp_path: Path, prefect_database: Path) -> None:
    """When the first command is killed, the second command still uses the server. A dead server is restarted at its old
    address.
    """
    give(prefect_database, tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-c", FIRST, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    url = first.stdout.readline().strip()
    second = HomeServer(tmp_path)
    assert (second.api_url, second.running) == (url, True)
    assert stat.S_IMODE(second.auth_file.stat().st_mode) == 0o600
    second.start()
    holder = second.pid
    first.kill()
    first.communicate()
    time.sleep(4 * POLL_SECONDS)  # time for several checks by the process that holds the server
    assert second.pid == holder
    os.kill(second.processes[-1], signal.SIGKILL)
    until(lambda: not second.running)
    second.restart()
    assert second.api_url == url
    assert http_answers(f"{url}/health", seconds=HANG_SECONDS)
    second.stop()
    assert not second.running
    third = HomeServer(tmp_path)
    assert (third.api_url, third.env) == (url, second.env)
    third.stop()


def test_new_command_waits_for_an_ending_server(tmp_path: Path) -> None:
    """Without the wait, the new command would use the ending server."""
    ending = take(tmp_path / "prefect" / "users")
    assert ending is not None
    found: list[HomeServer] = []
    newcomer = threading.Thread(target=lambda: found.append(HomeServer(tmp_path)))
    newcomer.start()
    newcomer.join(0.5)
    assert not found
    os.close(ending)
    newcomer.join()
    assert take(tmp_path / "prefect" / "users") is None  # the lock is taken, so the new command counts as a user
    found[0].stop()
    last = take(tmp_path / "prefect" / "users")
    assert last is not None
    os.close(last)


def test_server_restarted_by_another_command_is_kept(tmp_path: Path) -> None:
    server = HomeServer(tmp_path)
    held = take(tmp_path / "prefect" / "holder")
    assert held is not None
    with subprocess.Popen(["sleep", "600"], pass_fds=(held,)) as others:
        os.close(held)
        (tmp_path / "prefect" / "holder.pid").write_text(str(others.pid))
        server.relaunch()
        assert others.poll() is None
        (tmp_path / "prefect" / "holder.pid").write_text(str(others.pid))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "launch", lambda: None)
            server.relaunch()  # called again: the other command's server did not answer in time
        assert others.wait() == -signal.SIGTERM
    server.stop()


def test_killing_an_absent_server_signals_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to process -1 would go to all processes."""
    server, killed = HomeServer(tmp_path), list[int]()
    monkeypatch.setattr(HomeServer, "running", True)  # the server ends between this check and the kill
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(server, "_pid", tmp_path / "gone")
    server.kill()
    assert (server.pid, server.processes, killed) == (-1, [], [])
    monkeypatch.undo()
    server.stop()


def test_empty_secret_file_is_replaced(tmp_path: Path) -> None:
    """A full disk leaves an empty file, and server and clients would each create their own secret."""
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "auth").touch()
    servers = [HomeServer(tmp_path) for _ in range(2)]
    assert servers[0].env == servers[1].env
    assert stat.S_IMODE(servers[0].auth_file.stat().st_mode) == 0o600
    for server in servers:
        server.stop()


def test_checking_a_lock_blocks_no_other_process(tmp_path: Path) -> None:
    looks = take(tmp_path / "up.lock", shared=True)
    assert looks is not None
    done = threading.Timer(0.05, lambda: os.close(looks))
    done.start()
    with stack.hold_stack(tmp_path):
        assert stack.BorrowedStack(tmp_path).running


def test_service_keeps_its_port_unless_it_is_occupied(tmp_path: Path) -> None:
    port = stable_port(tmp_path, "prefect")
    assert stable_port(tmp_path, "prefect") == port
    other = free_port()
    store_addresses(tmp_path, mlflow=other)
    assert stable_port(tmp_path, "mlflow") == other
    with socket.create_server(("127.0.0.1", other)):
        assert stable_port(tmp_path, "mlflow") != other
    assert read_addresses(tmp_path).keys() == {"prefect", "mlflow"}


def options(**given: object) -> argparse.Namespace:
    nothing: dict[str, object] = dict.fromkeys(("prefect_port", "mlflow_port", "ray_port", "database"))
    return argparse.Namespace(**(nothing | given))


def test_unusable_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    database = "postgresql+asyncpg://me@db/prefect"
    assert requested_addresses(options(database=database)) == {"database": database}
    with pytest.raises(ConfigError, match=r"has a password.*PGPASSWORD") as refused:
        requested_addresses(options(database="postgresql+asyncpg://me:hidden@db/prefect"))
    assert "hidden" not in str(refused.value)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--mlflow-port {port}: another process uses this port"):
            requested_addresses(options(mlflow_port=port))
    held = take(tmp_path / "prefect" / "holder")
    assert held is not None
    with pytest.raises(ConfigError, match="a command uses the Prefect server"):
        requested_addresses(options(database=database))
    os.close(held)


def test_running_servers_of_a_run_home_are_found(tmp_path: Path) -> None:
    assert stack.find(tmp_path) is None
    assert not stack.end(tmp_path)
    up = stack.Stack(os.getpid(), "http://p", "", "http://m", {"PREFECT_API_AUTH_STRING": "secret"})
    with stack.hold_stack(tmp_path):
        assert stack.find(tmp_path) is None  # the stack is starting
        stack.announce(tmp_path, up)
        assert stack.find(tmp_path) == up
        assert stat.S_IMODE((tmp_path / "up.json").stat().st_mode) == 0o600
        assert stack.BorrowedStack(tmp_path).running
        with pytest.raises(
            ConfigError,
            match=r"already running; end them first with `rollflow serve --end`\nPrefect http://p/deployments",
        ):
            stack.hold_stack(tmp_path).__enter__()
    assert stack.find(tmp_path) is None
    assert not stack.BorrowedStack(tmp_path).running


def test_server_address_is_read_from_active_prefect_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert prefect_url() == ""
    profiles = '[profiles.work]\nPREFECT_API_URL = "http://work/api"\n[profiles.none]\n'
    (tmp_path / "profiles.toml").write_text(f'active = "work"\n{profiles}')
    assert prefect_url() == "http://work/api"
    monkeypatch.setenv("PREFECT_PROFILE", "none")
    assert prefect_url() == ""
    monkeypatch.setenv("PREFECT_API_URL", "http://given/api")
    assert prefect_url() == "http://given/api"
    monkeypatch.setenv("PREFECT_PROFILE", "work")
    monkeypatch.setenv("PREFECT_API_URL", "")
    assert prefect_url() == ""
