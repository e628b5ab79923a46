"""Tests parts of the start scripts (user data) of the AWS machines by running them: credentials (with OpenSSL and a
fake `aws`), passwords, and GPU demand.

The scripts are read from Terraform's plan, so Terraform has rendered them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.aws_server import aws_server, variables
from tests.support.machine_scripts import CREDENTIALS, REGION, fetch, user_data
from tests.support.terraform import SOURCE, why_not

ADDRESS = "10.42.0.10"
POSTGRES = Path("/usr/lib/postgresql")

needs_terraform = pytest.mark.skipif(bool(why_not()), reason=why_not())
group = pytest.mark.xdist_group("terraform")


def imported(file: Path) -> Any:
    """Import a program of `infra/` as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def openssl(*arguments: str) -> str:
    """Return what OpenSSL prints."""
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


@needs_terraform
@group
@pytest.mark.long
def test_machine_start_scripts_are_valid_shell(plan: dict[str, Any], tmp_path: Path) -> None:
    for kind, body in user_data(plan).items():
        file = tmp_path / kind
        file.write_text(body)
        done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), kind
        assert "#!/bin/bash" not in body.partition("\n")[2].partition("PROGRAM")[0], "one script, with one beginning"


@needs_terraform
@group
@pytest.mark.soak
def test_ray_credentials_are_created_once_and_shared(plan: dict[str, Any], tmp_path: Path, secrets: Any) -> None:
    bodies = user_data(plan)
    early = fetch(bodies["rollout"], tmp_path / "early", ADDRESS)
    assert early.returncode != 0, "there is no authority yet"
    assert "ResourceNotFoundException" in early.stderr
    head = fetch(bodies["head"], tmp_path / "head", ADDRESS)
    assert head.returncode == 0, head.stderr
    authority = secrets.get_secret_value(SecretId=CREDENTIALS[1])["SecretString"]
    for name, body in (("node", bodies["rollout"]), ("again", bodies["head"])):
        done = fetch(body, tmp_path / name, ADDRESS)
        assert done.returncode == 0, done.stderr
    assert secrets.get_secret_value(SecretId=CREDENTIALS[1])["SecretString"] == authority
    for name in ("head", "node", "again"):
        folder = tmp_path / name
        assert {file.name for file in folder.iterdir()} == {"token", "ca.crt", "node.crt", "node.key"}, name
        assert (folder / "token").read_text() == "the-token"
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
        assert openssl("verify", "-CAfile", str(tmp_path / "head" / "ca.crt"), str(folder / "node.crt")).endswith(
            "OK\n"
        )
        names = openssl("x509", "-in", str(folder / "node.crt"), "-noout", "-ext", "subjectAltName")
        assert f"IP Address:{ADDRESS}, IP Address:127.0.0.1, DNS:localhost" in names
    keys = {(tmp_path / name / "node.key").read_text() for name in ("head", "node", "again")}
    assert len(keys) == 3


@needs_terraform
@group
@pytest.mark.soak
def test_ray_head_without_read_access_creates_no_new_ca(plan: dict[str, Any], tmp_path: Path, secrets: Any) -> None:
    aws = tmp_path / "bin" / "aws"
    aws.write_text(aws.read_text().replace("try:\n", "if 'authority' in secret: sys.exit('AccessDenied')\ntry:\n", 1))
    done = fetch(user_data(plan)["head"], tmp_path / "head", ADDRESS)
    assert done.returncode != 0
    assert "AccessDenied" in done.stderr
    assert not (tmp_path / "head" / "key.pem").exists()


@needs_terraform
@group
@pytest.mark.soak
def test_servers_accept_the_options_of_the_start_scripts(plan: dict[str, Any]) -> None:
    text = "\n".join([*user_data(plan).values(), (SOURCE / "modules/control/control.sh.tftpl").read_text()])
    for command in ("ray start", "prefect server start", "prefect worker start", "mlflow server"):
        calls = [part for line in text.splitlines() for part in line.split(command)[1:]]
        given = {word for call in calls for word in re.findall(r"--[a-z-]+", call)}
        binary = str(Path(sys.executable).parent / command.split()[0])
        helped = subprocess.run(
            [binary, *command.split()[1:], "--help"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "COLUMNS": "300"},
        ).stdout
        known = set(re.findall(r"--[a-z-]+", helped))
        assert given, command
        assert given <= known, command


def test_password_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    control = imported(SOURCE / "modules" / "control" / "control_secrets.py")
    database = {"username": "rollflow", "password": "p@s/s:w%rd #1"}
    files = control.environment_files("db.internal:5432", database, "an-auth-string")
    assert files["prefect"] == (
        "PREFECT_SERVER_DATABASE_CONNECTION_URL="
        "postgresql+asyncpg://rollflow:p%40s%2Fs%3Aw%25rd%20%231@db.internal:5432/prefect\n"
        "PREFECT_SERVER_API_AUTH_STRING=rollflow:an-auth-string\n"
    )
    assert "/mlflow\n" in files["mlflow"]
    assert "password" not in files["client"]
    assert control.write_changed(tmp_path, files)
    assert not control.write_changed(tmp_path, files), "nothing has changed, so nothing is restarted"
    assert control.write_changed(tmp_path, {**files, "mlflow": "another\n"})
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert {file.name for file in tmp_path.iterdir()} == {"prefect", "mlflow", "client"}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[tuple[str, Path, str]]:
    """Start a Postgres that requires TLS; return its endpoint, its certificate authority and its password."""
    binaries = max(POSTGRES.glob("*/bin"))
    data, password, authority = tmp_path / "data", "p@s/s:w%rd #1", tmp_path / "authority.crt"
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    data.mkdir()
    (tmp_path / "password").write_text(password)
    if as_postgres:
        shutil.chown(data, "postgres", "postgres")
    made = [f"{binaries}/initdb", "-D", str(data), "--username=rollflow", "--auth=scram-sha-256"]
    made.append(f"--pwfile={tmp_path}/password")
    subprocess.run([*as_postgres, *made], check=True, capture_output=True, timeout=120)
    key, subject = str(data / "server.key"), ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, "-keyout", key, "-out", str(authority)
    )
    shutil.copy(authority, data / "server.crt")
    (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
    if as_postgres:
        shutil.chown(key, "postgres", "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-c", "ssl=on", "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"]
    serve = [*as_postgres, f"{binaries}/postgres", "-D", str(data), "-p", str(port), *options]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"localhost:{port}", authority, password
    finally:
        server.send_signal(signal.SIGINT)  # SIGINT ends Postgres at once, while SIGTERM waits for clients
        server.wait(60)


@pytest.mark.soak
@group
@pytest.mark.skipif(not [*POSTGRES.glob("*/bin/postgres")], reason="no Postgres server (Debian's package postgresql)")
def test_generated_passwords_open_a_real_database(
    database: tuple[str, Path, str], tmp_path: Path, secrets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, authority, password = database
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    monkeypatch.setenv("PGSSLROOTCERT", str(authority))
    client = {"host": "localhost", "port": int(endpoint.split(":")[1]), "user": "rollflow", "password": password}

    async def make_prefect() -> None:
        connection = await asyncpg.connect(**client, database="postgres", timeout=60)
        await connection.execute("CREATE DATABASE prefect")
        await connection.close()

    limit = time.monotonic() + 60
    while True:
        try:
            asyncio.run(make_prefect())
            break
        except (OSError, asyncpg.CannotConnectNowError):
            assert time.monotonic() < limit
            time.sleep(0.2)
    secrets.create_secret(Name="db", SecretString=json.dumps({"username": "rollflow", "password": password}))
    secrets.create_secret(Name="auth", SecretString="an-auth-string")
    control, folder = imported(SOURCE / "modules" / "control" / "control_secrets.py"), tmp_path / "run"
    folder.mkdir()
    arguments = (str(folder), endpoint, "db", "auth")
    assert [control.main(*arguments) for _ in range(2)] == [control.CHANGED, 0]
    urls = {name: (folder / name).read_text().splitlines()[0].partition("=")[2] for name in ("prefect", "mlflow")}

    async def ask_prefect() -> str:
        async with create_async_engine(urls["prefect"]).connect() as connection:
            return str(await connection.scalar(text("SELECT current_database()")))

    assert asyncio.run(ask_prefect()) == "prefect"
    with create_engine(urls["mlflow"]).connect() as connection:
        assert connection.scalar(text("SELECT current_database()")) == "mlflow"
        assert connection.scalar(text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")) is True
    monkeypatch.setenv("PGSSLROOTCERT", "/etc/ssl/certs/ca-certificates.crt")
    with pytest.raises(ssl.SSLError):
        asyncio.run(ask_prefect())
    secrets.put_secret_value(SecretId="auth", SecretString="another-string")
    monkeypatch.setenv("PGSSLROOTCERT", str(authority))
    assert control.main(*arguments) == control.CHANGED


@pytest.mark.long
def test_used_and_requested_gpus_are_counted() -> None:
    from ray.autoscaler.v2 import schema

    demand = imported(SOURCE / "modules" / "ray" / "gpu_demand.py")
    bundles = [
        ({"GPU": 1.0}, 2),
        ({"CPU": 4.0}, 3),
        ({"GPU": 4.0, "train": 0.001}, 1),
        ({"GPU": 0.5, "rollout": 1.0}, 2),
    ]
    actors = schema.RayTaskActorDemand([schema.ResourceRequestByCount(bundle, count) for bundle, count in bundles])
    grouped = schema.PlacementGroupResourceDemand([schema.ResourceRequestByCount({"GPU": 2.0}, 1)], details="")
    status = schema.ClusterStatus(
        cluster_resource_usage=[schema.ResourceUsage("GPU", 8.0, 5.0), schema.ResourceUsage("CPU", 8.0, 7.0)],
        resource_demands=schema.ResourceDemandSummary([grouped], [actors]),
    )
    assert demand.count_gpus(status) == {"GpusWaiting": 5.0, "GpusWanted": 10.0}
    assert demand.count_gpus(schema.ClusterStatus()) == {"GpusWaiting": 0.0, "GpusWanted": 0.0}


@pytest.mark.soak
@pytest.mark.xdist_group("terraform")
def test_alarms_use_the_metric_of_gpu_demand(tmp_path: Path) -> None:
    """The program runs as under systemd, with a Ray node of its own, and writes the metrics that the alarms use."""
    code = """
        import datetime, runpy, sys, time, boto3, ray
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

        @ray.remote(num_cpus=0)
        class Idle:
            pass

        waiting = [Idle.options(num_gpus=2).remote(), Idle.options(num_gpus=1).remote()]
        waiting.append(Idle.options(num_gpus=4, resources={"train": 0.001}).remote())
        client, limit, value = boto3.client("cloudwatch"), time.monotonic() + 120, None
        sys.argv = ["gpu_demand.py", ray.get_runtime_context().gcs_address, "rollflow/rollflow"]
        while value != 3.0 and time.monotonic() < limit:
            runpy.run_path(PROGRAM, run_name="__main__")
            now = datetime.datetime.now(datetime.timezone.utc)
            span = {"StartTime": now - datetime.timedelta(hours=1), "EndTime": now + datetime.timedelta(hours=1)}
            asked = {"Namespace": "rollflow/rollflow", "MetricName": "GpusWaiting", "Period": 7200, **span}
            points = client.get_metric_statistics(Statistics=["Maximum"], **asked)["Datapoints"]
            value = max(point["Maximum"] for point in points)
            time.sleep(0.5)
        names = sorted({(one["Namespace"], one["MetricName"]) for one in client.list_metrics()["Metrics"]})
        print(value, names)
        """
    program = repr(str(SOURCE / "modules" / "ray" / "gpu_demand.py"))
    with aws_server() as endpoint:
        environment = {**os.environ, **variables(endpoint), "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}
        command = [sys.executable, "-c", textwrap.dedent(code).replace("PROGRAM", program)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = [("rollflow/rollflow", "GpusWaiting"), ("rollflow/rollflow", "GpusWanted")]
    assert done.stdout.splitlines()[-1] == f"3.0 {wanted}", done.stdout
