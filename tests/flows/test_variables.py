"""Tests environment variables and limits: a run works with each setting, or one sentence names the variable (exit code
2).
"""

from __future__ import annotations

import http.server
import os
import pwd
import resource
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import botocore.utils
import httpx
import pytest
import requests

from rollflow.flows.deployments import build_runner
from rollflow.flows.ray_cluster import ray_head
from rollflow.flows.services import variables
from rollflow.flows.services.profile import prefect_url
from rollflow.flows.services.variables import OWN_PREFECT, OWN_RAY, PROXIES, bypass_proxies, drop_settings, give_home
from tests.support.refused import refused
from tests.support.small_run import make_policy

RECIPE = "flows/recipes/sorting.toml"
LONG = "y" * 120
DEAD = "http://127.0.0.1:9"  # a proxy address where nothing listens


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a new home, no proxy, and no cached temporary folder."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    for name in (*PROXIES, "no_proxy", "NO_PROXY", "PREFECT_API_URL", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")  # lets the end of the test undo what a command sets
        monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HTTP_PROXY", "ftp://me:hidden@host", ["'ftp://host'", "http://host:port"]),
        ("http_proxy", "http://host:port", ["not an address of a proxy"]),
        ("HTTPS_PROXY", "http://a host", ["not an address of a proxy"]),
        ("https_proxy", "http://", ["not an address of a proxy"]),
        ("ALL_PROXY", "socks4://host:1", ["not an address of a proxy"]),
        ("all_proxy", "http://[::", ["not an address of a proxy", "unset all_proxy"]),
        ("ROLLFLOW_HOME", "/etc/passwd", ["cannot be written", "set ROLLFLOW_HOME"]),
        ("ROLLFLOW_HOME", "/proc/home", ["cannot be written"]),
        ("ROLLFLOW_HOME", "/dev/null/home", ["cannot be written"]),
        ("ROLLFLOW_HOME", f"/tmp/{LONG * 3}", ["too long"]),
        ("ROLLFLOW_HOME", "~nobody-of-this-name/home", ["is not the path of a folder"]),
        ("PYTHONWARNINGS", "error", ["unset PYTHONWARNINGS"]),
        ("PYTHONWARNINGS", "default,e::DeprecationWarning", ["unset PYTHONWARNINGS"]),
        ("PREFECT_API_URL", f"{DEAD}/api", ["does not answer", "unset PREFECT_API_URL"]),
    ],
)
def test_environment_variable_that_breaks_a_service_is_refused(
    name: str, value: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    said = refused(capsys, "run", RECIPE)
    assert said.startswith(f"{name} = ")
    assert all(word in said for word in words), said
    assert "hidden" not in said


@pytest.mark.parametrize("command", ["run", "resume", "sweep"])
@pytest.mark.parametrize("scheme", variables.SOCKS)
def test_socks_proxy_without_its_package_is_refused(
    command: str, scheme: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(variables, "find_spec", lambda name: None)
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://127.0.0.1:9")
    said = refused(capsys, command, RECIPE)
    assert "ALL_PROXY" in said
    assert "pip install socksio" in said


def test_long_path_of_the_temporary_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LONG).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / LONG))
    said = refused(capsys, "run", RECIPE)
    assert said.startswith("TMPDIR = ")
    assert "at most 70" in said


def test_machine_without_a_temporary_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(variables.tempfile, "gettempdir", none)
    assert refused(capsys, "run", RECIPE).startswith("TMPDIR = ")


def test_too_low_limit_on_open_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = variables.NEEDED_FILES - 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (few, few))
    assert refused(capsys, "run", RECIPE).startswith(f"ulimit -n = {few}: ")


def test_limit_on_open_files_is_raised_if_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    for soft, hard in ((256, 4096), (256, resource.RLIM_INFINITY), (4096, 4096), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=(soft, hard): limits)
        variables.check_variables()
    assert raised == [(4096, 4096), (variables.WANTED_FILES, resource.RLIM_INFINITY)]


def test_removed_working_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", "")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "set ROLLFLOW_HOME to an absolute path" in refused(capsys, "status")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the address of a loopback server that answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()


def _by_urllib(url: str) -> int:
    with urllib.request.build_opener().open(url) as response:
        return int(response.status)


CLIENTS: dict[str, Callable[[str], int]] = {
    "Prefect's": lambda url: httpx.get(url).status_code,
    "MLflow's": lambda url: requests.get(url, timeout=60).status_code,
    "Python's": _by_urllib,
    "S3's": lambda url: 407 if botocore.utils.get_environ_proxies(url) else 200,
}


@pytest.mark.parametrize("given", ["", "example.org", "fd00::/8, [::1],10.0.0.0/8", "*", "127.0.0.1"])
@pytest.mark.parametrize("name", PROXIES)
def test_loopback_bypasses_proxies(name: str, given: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, DEAD)
    monkeypatch.setenv("NO_PROXY", given)
    bypass_proxies(os.environ)
    for client, get in CLIENTS.items():
        assert get(server) == 200, client
    assert ("example.org" in os.environ["NO_PROXY"]) == (given == "example.org")


def test_requests_to_other_hosts_still_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", DEAD)
    bypass_proxies(os.environ)
    assert botocore.utils.get_environ_proxies("https://bucket.s3.amazonaws.com")["https"] == DEAD
    with pytest.raises(httpx.ConnectError):
        httpx.get("https://example.org")


def test_no_proxy_variable_is_unchanged_without_a_proxy() -> None:
    environment = {"NO_PROXY": "example.org", "HTTP_PROXY": ""}
    bypass_proxies(environment)
    assert environment == {"NO_PROXY": "example.org", "HTTP_PROXY": ""}


def test_variables_of_other_services_are_removed() -> None:
    prefect = {"PREFECT_API_KEY": "k", "PREFECT_PROFILE": "p", "PREFECT_SERVER_API_PORT": "x"}
    ray = {"RAY_ADDRESS": "ray://a:1", "RAY_AUTH_TOKEN": "t", "RAY_RUNTIME_ENV_HOOK": "no.such", "RAY_JOB_ID": "1"}
    others = {"PREFECT_CLIENT_METRICS_ENABLED": "true", "RAY_memory_usage_threshold": "0.9", "HOME": "/"}
    environment = {**prefect, **ray, **others}
    drop_settings(environment, OWN_RAY)
    assert environment == {**prefect, **others}
    drop_settings(environment, OWN_PREFECT)
    assert environment == others


@pytest.mark.parametrize(("name", "value"), [("LC_ALL", "C"), ("LC_CTYPE", "POSIX")])
def test_non_utf8_locale_is_refused(name: str, value: str) -> None:
    """Python reads the locale before a command's first line, so this test starts a process."""
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "run", RECIPE]
    given = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    given |= {name: value, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"rollflow: {name} = '{value}' with PYTHONUTF8 = '0'")


def test_characters_the_terminal_cannot_print_are_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "check", str(tmp_path / "ü.toml")]
    given = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "\\xfc.toml" in ended.stderr


def test_child_processes_do_not_inherit_pythonioencoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    refused(capsys, "check", "no-such.toml")
    assert "PYTHONIOENCODING" not in os.environ


def test_socket_paths_are_short_under_a_long_run_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LONG).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / LONG))
    short = ray_head.short_folder(tmp_path / LONG / "home")
    assert len(os.fsencode(short)) + ray_head.RAY_SUFFIX_BYTES <= variables.SOCKET_PATH_BYTES


def test_user_without_a_home_gets_the_run_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for name in ("HOME", "PREFECT_HOME", "PREFECT_API_URL"):
        monkeypatch.setenv(name, "/home/of/somebody")  # lets the end of the test undo what a command sets
        give_home(os.environ, tmp_path)
        assert os.environ[name] == "/home/of/somebody"
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert prefect_url() == ""
    give_home(os.environ, tmp_path)
    assert Path.home() == tmp_path


def test_runner_works_in_the_run_home(tmp_path: Path) -> None:
    """Prefect's own folder belongs to the machine's first user."""
    one, other = build_runner(None), build_runner(None)
    assert one._tmp_dir.is_relative_to(tmp_path / "home")
    assert one._tmp_dir != other._tmp_dir


def test_unreadable_policy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may read everything, so the test answers as the system answers other users."""
    folder = tmp_path / "policy"
    make_policy(folder)
    capsys.readouterr()  # discards the library's output on standard error
    hidden = folder / "model.safetensors"
    monkeypatch.setattr(os, "access", lambda path, mode: path != hidden)
    arguments = ("--set", f"policy={{path = '{folder}'}}")
    assert f"may not read '{hidden}'" in refused(capsys, "check", RECIPE, *arguments)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    assert f"may not read '{folder}'" in refused(capsys, "check", RECIPE, *arguments)


def test_policy_folder_of_an_unknown_user_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = "policy={path = '~nobody-of-this-name/policy'}"
    assert "there is no such folder" in refused(capsys, "check", RECIPE, "--set", given)


@pytest.mark.long
def test_invalid_prefect_setting_is_named() -> None:
    """Prefect reads its settings while it is imported, so this test starts a process."""
    code = """
from unittest import mock
from rollflow.flows import session
from rollflow.storage.errors import ConfigError
try:
    session._import_prefect(mock.Mock())
except ConfigError as error:
    print(error)
"""
    given = {**os.environ, "PREFECT_CLIENT_MAX_RETRIES": "many"}
    ended = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert "PREFECT_CLIENT_MAX_RETRIES" in ended.stdout
    assert "max_retries Input should be a valid integer" in ended.stdout
    assert "unset the variable" in ended.stdout


@pytest.mark.parametrize(("command", "code"), [("keys", 0), ("check no-such.toml", 2)])
def test_command_works_with_its_streams_closed(command: str, code: int) -> None:
    line = f"exec {sys.executable} -m rollflow.flows.commands.cli {command} 0<&- 1>&- 2>&-"
    assert subprocess.run(["bash", "-c", line], check=False).returncode == code
