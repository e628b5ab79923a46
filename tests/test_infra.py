"""Tests of the compose file, the image and the scripts of `infra/`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import moto.s3.models
import pytest

from tests.support.compose import FILE, read, secrets
from tests.support.dockerfile import stages, steps
from tests.support.machines import REPOSITORY
from tests.support.s3_server import s3_server, use

INFRA = REPOSITORY / "infra"
SCRIPTS = ("secrets.sh", "wheelhouse.sh", "backup.sh", "slurm/rollflow.sbatch")
QUIET = {  # maps the command or manifest entry that starts a service to the settings that turn off its usage statistics
    "prefect server start": ("PREFECT_SERVER_ANALYTICS_ENABLED", "--analytics-off"),
    "mlflow server": ("MLFLOW_DISABLE_TELEMETRY",),
    "ray start --": ("RAY_USAGE_STATS_ENABLED", "--disable-usage-stats"),
    "rayVersion:": ("RAY_USAGE_STATS_ENABLED",),
}


# --- compose.yaml ---------------------------------------------------------------------------------------------------


def test_ports_are_open_on_loopback_only() -> None:
    ports = [port for service in read(secrets()).values() for port in service.get("ports", ())]
    assert len(ports) == 2
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports), ports


def test_started_services_send_no_usage_statistics() -> None:
    begun = set()
    for file in (file for kind in ("yaml", "sbatch", "tftpl") for file in INFRA.rglob(f"*.{kind}")):
        words = " ".join(re.sub(r"#.*", "", file.read_text()).translate(str.maketrans("[],", "   ")).split())
        for start in (start for start in QUIET if start in words):
            begun.add(start)
            assert any(switch in words for switch in QUIET[start]), f"{file}: {start}"
    assert begun == {*QUIET}


@pytest.mark.parametrize("name", ["POSTGRES_PASSWORD", "PREFECT_AUTH", "RAY_TOKEN", "S3_KEY", "S3_SECRET"])
def test_compose_file_requires_each_secret(name: str) -> None:
    """A service never starts with an empty password."""
    values = {**secrets(), name: ""}
    with pytest.raises(AssertionError, match=f"{name} is required: run infra/secrets.sh"):
        read(values)


def test_generated_secrets_are_new_each_time() -> None:
    first, second = secrets(), secrets()
    assert {name for name in first if first[name] == second[name]} == {"S3_KEY"}
    assert all(len(value) >= 48 for name, value in first.items() if name != "S3_KEY")


def test_secret_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    """An existing file of secrets is never replaced, because the databases use its secrets."""
    file = tmp_path / "env"
    first = subprocess.run([INFRA / "secrets.sh", file], umask=0o022)
    kept = file.read_text()
    again = subprocess.run([INFRA / "secrets.sh", file], capture_output=True, text=True)
    assert (first.returncode, file.stat().st_mode & 0o777) == (0, 0o600)
    assert (again.returncode, file.read_text()) == (1, kept)
    assert "is there already" in again.stderr


def compose_command() -> list[str] | None:
    """Return the command of Docker Compose; None if it is not installed."""
    plugin = ["docker", "compose"]
    if shutil.which("docker") and subprocess.run([*plugin, "version"], capture_output=True).returncode == 0:
        return plugin
    return ["docker-compose"] if shutil.which("docker-compose") else None


def test_docker_compose_accepts_the_compose_file(tmp_path: Path) -> None:
    """Debian's `docker-compose` (version 1) does not know the key `name`, so the test removes this key for it."""
    if (command := compose_command()) is None:
        pytest.skip("neither the plugin `docker compose` nor docker-compose is installed")
    text = FILE.read_text()
    if command == ["docker-compose"]:
        text = re.sub(r"^name: .*$", "", text, flags=re.MULTILINE)
    for wrong, accepted in (("", True), ("    imagex: rollflow\n", False)):
        copy = tmp_path / "compose.yaml"
        copy.write_text(text.replace("    image:", f"{wrong}    image:", 1))
        check = [*command, "--project-directory", str(FILE.parent), "--file", str(copy), "config", "--quiet"]
        environment = {"PATH": "/usr/bin:/usr/local/bin", **secrets()}
        done = subprocess.run(check, env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) is accepted, done.stderr


def test_services_refer_to_existing_files() -> None:
    services = read(secrets())
    own = [service for service in services.values() if service["image"].startswith("rollflow:")]
    assert {service["build"]["target"] for service in own} == {"cpu"}
    assert (FILE.parent / own[0]["build"]["context"] / own[0]["build"]["dockerfile"]).samefile(INFRA / "Dockerfile")
    files = [
        source for service in services.values() for source in service.get("volumes", ()) if source.startswith("./")
    ]
    assert files
    assert all((INFRA / source.split(":")[0]).is_file() for source in files)


# --- bucket.py ------------------------------------------------------------------------------------------------------


def bucket_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bucket", INFRA / "bucket.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with s3_server("other") as endpoint:
        use(endpoint, monkeypatch)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setattr(sys, "argv", ["bucket.py", "team"])
        yield bucket_script()


def client(script: ModuleType) -> Any:
    return script.boto3.client("s3")


@pytest.mark.long
def test_bucket_is_created_once_and_versioned(bucket: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert [bucket.main(), bucket.main()] == [0, 0]
    assert client(bucket).get_bucket_versioning(Bucket="team")["Status"] == "Enabled"
    assert client(bucket).list_object_versions(Bucket="team").get("Versions", []) == []
    assert "conditional writes are atomic" in capsys.readouterr().out


@contextmanager
def slow_writes(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the S3 server check and write an object in separate steps, as several real servers did."""
    import moto.s3.responses as responses

    unlocked = responses.S3Response.put_object.__wrapped__  # type: ignore[attr-defined]
    write = moto.s3.models.S3Backend.put_object

    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return write(*arguments, **named)

    with patch.context() as inner:
        inner.setattr(responses.S3Response, "put_object", unlocked)
        inner.setattr(moto.s3.models.S3Backend, "put_object", late)
        yield


@pytest.mark.long
def test_s3_server_without_atomic_creation_is_refused(
    bucket: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with slow_writes(monkeypatch):
        assert bucket.main() == 1
    said = capsys.readouterr().err
    assert re.search(r"not fit for rollflow: of 16 writers that created one object at once, \d+ succeeded, not 1", said)


@pytest.mark.long
def test_bucket_script_waits_for_a_starting_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollflow.flows.services.process import free_port

    port = free_port()
    use(f"http://127.0.0.1:{port}", monkeypatch)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(sys, "argv", ["bucket.py", "team"])
    script, ended = bucket_script(), threading.Event()

    def serve() -> None:
        time.sleep(2.0)
        with s3_server("other", port=port):
            ended.wait()

    server = threading.Thread(target=serve)
    server.start()
    try:
        assert script.main() == 0
    finally:
        ended.set()
        server.join()


# --- Dockerfile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_make_targets_install_the_pinned_versions(target: str) -> None:
    found = [*steps(INFRA / "Dockerfile", target)]
    assert found[0] == ("FROM", "debian:12-slim")
    assert found[-1] == ("USER", "rollflow"), "it does not run as root"
    commands = " ".join(rest for verb, rest in found if verb == "RUN")
    assert f"--requirement infra/constraints-{target}.txt" in commands
    other = {"cpu": "gpu", "gpu": "cpu"}[target]
    assert f"--requirement infra/constraints-{other}.txt" not in commands


def test_dockerfile_stages_have_parent_images() -> None:
    found = stages(INFRA / "Dockerfile")
    assert {stage.parent for stage in found.values()} - found.keys() == {"scratch", "debian:12-slim"}


def test_docker_build_context_has_the_files_of_the_wheel() -> None:
    """No secrets, environments or runs of a clone get into the image."""
    lines = (REPOSITORY / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    let = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert {"flows", "tasks", "storage", "tests/contracts/testing", "pyproject.toml", "README.md", "LICENSE"} <= let
    assert not any(".env" in name or name in ("infra", "tests", ".venv") for name in let)


# --- scripts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts_parse(name: str) -> None:
    shell = "bash" if name.endswith(".sbatch") else "sh"
    assert (INFRA / name).read_text().startswith("#!")
    assert subprocess.run([shell, "-n", INFRA / name], capture_output=True).returncode == 0
    assert name.endswith(".sbatch") or (INFRA / name).stat().st_mode & 0o111


@pytest.mark.slow
@pytest.mark.soak
def test_wheelhouse_serves_a_machine_without_registry(tmp_path: Path) -> None:
    """With two small pins, the script installs from the collected wheels without a registry."""
    infra = tmp_path / "infra"
    infra.mkdir()
    for name in ("wheelhouse.sh", "constraints-build.txt"):
        shutil.copy(INFRA / name, infra)
    (infra / "constraints-cpu.txt").write_text("iniconfig==2.3.1\nidna==3.20\n")
    for name in ("flows", "tasks", "storage", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    environment = {"PYTHON": sys.executable}
    made = _shell([infra / "wheelhouse.sh", "cpu", tmp_path / "house"], environment)
    if "Could not find a version" in made.stderr or "No matching distribution" in made.stderr:
        pytest.skip("no registry of packages is reached from here")
    assert made.returncode == 0, made.stdout + made.stderr
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_NO_INDEX": "1"}
    installed = _shell([tmp_path / "house/install.sh", tmp_path / "env"], environment | nowhere)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    shown = _shell([tmp_path / "env/bin/pip", "list", "--format=freeze"], {}).stdout
    assert "idna==3.20" in shown
    assert "rollflow==" in shown
    sums = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "house", capture_output=True
    )
    assert sums.returncode == 0


def _shell(command: list[Any], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run([*map(str, command)], env=os.environ | environment, capture_output=True, text=True)
