"""Tests that a run writes no secret of its environment variables anywhere: not to the store, logs, server databases or
output.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import boto3
import pytest

from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.services.process import MlflowServer, PrefectServer, start_together, stop_together
from tests.support.certificates import make_certificates
from tests.support.prefect_home import give
from tests.support.s3_server import s3_server
from tests.support.small_run import make_policy
from tests.support.tls_proxy import tls_proxy
from tests.support.waiting import RUN_SECONDS

RECIPE = """
name = "secrets"
versions = 2
groups = 2
group_size = 2

[policy]
path = "{policy}"

[engine]
kind = "transformers"
max_new_tokens = 4

[evaluation]
every = 1
prompts = 2

[store]
uri = "s3://secrets/team"
[cluster]
address = "{ray}"
env = {{ NCCL_DEBUG = "WARN" }}
[tracking]
uri = "{mlflow}"
"""
PLANTED = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDACCESSKEY",
    "AWS_SECRET_ACCESS_KEY": "planted/s3+secret0123456789abcdefghijkl",
    "AWS_SESSION_TOKEN": "planted-s3-session-0123456789",
    "MLFLOW_TRACKING_USERNAME": "planted-mlflow-user",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
    "HF_TOKEN": "hf_planted0123456789",
    "PGPASSWORD": "planted-postgres-password",
}
KEEPERS = ("token", "auth", "up.json")  # files that hold a secret and that only this user may read


def forms(secret: str) -> list[bytes]:
    """Return the forms in which a secret may be written: plain, quoted for a URL, or in base64 at any offset."""
    found = [secret.encode(), quote(secret, safe="").encode()]
    for before in range(3):
        coded = base64.b64encode(b"x" * before + secret.encode())
        found.append(coded[(before * 8 + 5) // 6 + 1 : -4])  # the characters that do not depend on the bytes around it
    return found


def leaks(places: Mapping[str, bytes], secrets: Mapping[str, str]) -> list[str]:
    """List the places in which a secret was found."""
    wanted = {name: forms(secret) for name, secret in secrets.items()}
    return [
        f"{name} in {place}"
        for place, content in places.items()
        for name, written in wanted.items()
        if any(one in content for one in written)
    ]


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file below a folder, except files that store a secret on purpose."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.name.startswith(KEEPERS):
            yield str(path), path.read_bytes()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("secret", PLANTED.values(), ids=PLANTED)
def test_secret_search_finds_every_encoding_of_a_secret(secret: str) -> None:
    for text in (f"key={secret};", f"https://me:{quote(secret, safe='')}@host", f"me:{secret}"):
        assert leaks({"log": text.encode()}, {"X": secret}) == ["X in log"]
    for user in ("", "m", "me", "me:"):
        header = b"Authorization: Basic " + base64.b64encode(f"{user}{secret}".encode())
        assert leaks({"log": header}, {"X": secret}) == ["X in log"]
    assert leaks({"log": b"nothing"}, {"X": secret}) == []


@pytest.mark.slow
@pytest.mark.soak
def test_run_stores_and_logs_no_secret(tmp_path: Path, prefect_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run uses given Prefect, Ray and MLflow servers, and gets their secrets from the environment.

    Prefect and MLflow are reached by HTTPS, with certificates from their own settings.
    """
    make_policy(tmp_path / "policy")
    give(prefect_database, tmp_path / "server")
    prefect, ray = PrefectServer(tmp_path / "server"), RayHead(tmp_path / "ray", cpus=2)
    mlflow = MlflowServer(tmp_path / "tracking")
    home, recipe, tls = tmp_path / "home", tmp_path / "recipe.toml", make_certificates(tmp_path / "tls")
    with (
        s3_server("secrets") as endpoint,
        tls_proxy(tls, port_of(prefect.ui_url)) as to_prefect,
        tls_proxy(tls, port_of(mlflow.url)) as to_mlflow,
    ):
        for name, value in {**PLANTED, "AWS_ENDPOINT_URL_S3": endpoint}.items():
            monkeypatch.setenv(name, value)  # each Ray node reads its credentials from its own environment variables
        start_together(prefect, ray, mlflow)
        try:
            place = {"ray": ray.address, "mlflow": f"https://127.0.0.1:{to_mlflow}"}
            recipe.write_text(RECIPE.format(policy=tmp_path / "policy", **place))
            token = {"RAY_AUTH_TOKEN": (ray.folder / "token").read_text()}
            secrets = PLANTED | token | {"PREFECT_API_AUTH_STRING": prefect.env["PREFECT_API_AUTH_STRING"]}
            given = {**prefect.env, **ray.env, "ROLLFLOW_HOME": str(home), **secrets}
            given |= {"PREFECT_API_URL": f"https://127.0.0.1:{to_prefect}/api"}
            authority = str(tls.authority)
            given |= {"PREFECT_API_SSL_CERT_FILE": authority, "MLFLOW_TRACKING_SERVER_CERT_PATH": authority}
            given.pop("RAY_AUTH_TOKEN_PATH")
            command = [sys.executable, "-m", "rollflow.flows.commands.cli", "run", str(recipe), "--run-id", "planted"]
            ended = subprocess.run(
                command, env={**os.environ, **given}, capture_output=True, cwd=tmp_path, timeout=RUN_SECONDS
            )
            store = boto3.client(
                "s3", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
            )
            keys = [one["Key"] for one in store.list_objects_v2(Bucket="secrets").get("Contents", ())]
            objects = {f"s3://{key}": store.get_object(Bucket="secrets", Key=key)["Body"].read() for key in keys}
        finally:
            stop_together(prefect, ray, mlflow)
    places = {"output": ended.stdout + ended.stderr, **objects, **dict(files(tmp_path))}
    said = (ended.stdout + ended.stderr).decode(errors="replace")
    assert ended.returncode == 0, said[-4000:]
    for where in ("s3://", str(home / "logs"), str(tmp_path / "server"), str(tmp_path / "tracking"), str(ray.folder)):
        read = [place for place, content in places.items() if place.startswith(where) and b"planted" in content]
        assert read, f"nothing of the run is in {where}: it is not where this test looks"
    assert leaks(places, secrets) == []
