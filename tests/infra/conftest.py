"""Defines the fixtures of the tests of `infra/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.aws_server import aws_server, variables
from tests.support.machine_scripts import AWS, CREDENTIALS, REGION
from tests.support.terraform import PLANTED, prepare


@pytest.fixture(scope="package")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield Terraform's plan of the example `cluster`, with test secrets in it."""
    with aws_server() as endpoint:
        yield prepare("cluster", tmp_path_factory.mktemp("cluster"), endpoint, PLANTED).plan()


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of a simulated Secrets Manager, which has Ray's token and an empty secret for the certificate
    authority. A fake command `aws` is in the PATH.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "aws").write_text(AWS)
    (tmp_path / "bin" / "aws").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with aws_server() as endpoint:
        for name, value in {**variables(endpoint), "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("secretsmanager", region_name=REGION)
        client.create_secret(Name=CREDENTIALS[0], SecretString="the-token")
        client.create_secret(Name=CREDENTIALS[1])
        yield client
