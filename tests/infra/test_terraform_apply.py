"""Tests both Terraform examples: each is validated, applied to moto (a simulation of AWS) and destroyed. Its settings
must be valid, and no secret may be stored.

moto shows that the calls to AWS exist and are consistent. It does not show the behaviour of AWS.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest

from rollflow.flows.commands.cli import main
from rollflow.storage.errors import Conflict
from rollflow.storage.objects import open_store
from tests.support.aws_server import aws_server, variables
from tests.support.terraform import (
    BUCKET,
    PLANTED,
    Terraform,
    prepare,
    resources,
    script,
    state_resources,
    statements,
    why_not,
)

REGION = "eu-central-1"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("terraform"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables that make this process use the simulated AWS, too."""
    for name, value in {**variables(endpoint), "AWS_REGION": REGION}.items():
        monkeypatch.setenv(name, value)


def doctor_on(settings: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return doctor's output for a settings file, which must load."""
    file = folder / "settings.toml"
    file.write_text(settings)
    assert main(["doctor", "--json", "--settings", str(file)]) in (0, 1)
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def check_bucket(endpoint: str) -> None:
    """Check that conditional writes work under the bucket's policy, and that a deleted object is recoverable."""
    store = open_store(f"s3://{BUCKET}/store")
    store.create("probe", b"one")
    with pytest.raises(Conflict):
        store.create("probe", b"two")
    store.delete("probe")
    s3 = boto3.client("s3", region_name=REGION, endpoint_url=endpoint)
    assert len(s3.list_object_versions(Bucket=BUCKET, Prefix="store/probe")["Versions"]) >= 1
    store.create("probe", b"three")


def check_secrets(terraform: Terraform, state: Mapping[str, Any]) -> None:
    """Check that machines can read their secrets, and that no file, output or script contains them."""
    client = boto3.client("secretsmanager", region_name=REGION, endpoint_url=terraform.endpoint)
    names = {"ray_token": "rollflow/ray-token", "prefect_password": "rollflow/prefect-auth"}
    for key, secret in PLANTED.items():
        assert client.get_secret_value(SecretId=names[key])["SecretString"] == secret
        for file in terraform.folder.iterdir():
            assert not file.is_file() or secret.encode() not in file.read_bytes(), file
        assert secret not in json.dumps(state)
    password = json.loads(client.get_secret_value(SecretId=database_secret(state))["SecretString"])["password"]
    given = [
        address
        for address, attributes in state_resources(state).items()
        if attributes.get("user_data_base64") or attributes.get("user_data")
        if any(secret in script(attributes) for secret in (*PLANTED.values(), password))
    ]
    assert given == []


def check_scripts(state: Mapping[str, Any], folder: Path) -> None:
    """Check that the user data of every machine is valid shell."""
    given = [one for one in state_resources(state).values() if one.get("user_data_base64") or one.get("user_data")]
    assert given
    for attributes in given:
        (folder / "script").write_text(script(attributes))
        done = subprocess.run(["bash", "-n", str(folder / "script")], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def database_secret(state: Mapping[str, Any]) -> str:
    """Return the secret in which RDS keeps the password."""
    database = state_resources(state)["module.control.aws_db_instance.this"]
    return str(database["master_user_secret"][0]["secret_arn"])


def check_gone(endpoint: str) -> None:
    """Check that no resource that costs money is left."""

    def client(service: str) -> Any:
        return boto3.client(service, region_name=REGION, endpoint_url=endpoint)

    assert client("s3").list_buckets()["Buckets"] == []
    reservations = client("ec2").describe_instances()["Reservations"]
    states = {machine["State"]["Name"] for one in reservations for machine in one["Instances"]}
    assert states <= {"terminated"}
    nat = client("ec2").describe_nat_gateways()["NatGateways"]
    assert {one["State"] for one in nat} <= {"deleted"}
    assert client("rds").describe_db_instances()["DBInstances"] == []
    assert client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"] == []
    assert client("secretsmanager").list_secrets()["SecretList"] == []


def test_terraform_destroy_keeps_the_stored_runs_by_default(tmp_path: Path) -> None:
    key = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    with aws_server() as endpoint:
        terraform = prepare("cluster", tmp_path, endpoint, delete_runs_on_destroy=False, kms_key_arn=key)
        plan = terraform.plan()
        (bucket,) = resources(plan, "aws_s3_bucket").values()
        assert bucket["force_destroy"] is False
        (database,) = resources(plan, "aws_db_instance").values()
        assert (database["deletion_protection"], database["skip_final_snapshot"]) == (True, False)
        secrets = resources(plan, "aws_secretsmanager_secret").values()
        assert {secret["recovery_window_in_days"] for secret in secrets} == {7}
        assert {secret["kms_key_id"] for secret in secrets} == {database["kms_key_id"]} == {key}
        (encryption,) = resources(plan, "aws_s3_bucket_server_side_encryption_configuration").values()
        (default,) = encryption["rule"][0]["apply_server_side_encryption_by_default"]
        assert (default["sse_algorithm"], default["kms_master_key_id"]) == ("aws:kms", key)
        allowed = [one["resources"] for _, one in statements(plan) if one["sid"] == "UseKey"]
        assert allowed == [[key]] * 3


def test_terraform_variables_are_validated(tmp_path: Path) -> None:
    wrong = {"region": "Frankfurt", "bucket": "Team_Runs", "dollars_per_month": 0, "emails": [], "disk_gib": 1}
    with aws_server() as endpoint:
        terraform = prepare("small", tmp_path, endpoint, **wrong)
        done = terraform.run("plan", "-no-color", code=1)
    for name in wrong:
        assert f"var.{name}" in done, name


@pytest.mark.parametrize("example", ["small", "cluster"])
def test_terraform_example_is_applied_and_destroyed(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    with aws_server() as endpoint:
        use(endpoint, monkeypatch)
        terraform = prepare(example, tmp_path, endpoint, PLANTED if example == "cluster" else {})
        terraform.run("validate", "-no-color")
        terraform.plan()
        state = terraform.apply()
        check_bucket(endpoint)
        check_scripts(state, tmp_path)
        found = doctor_on(terraform.run("output", "-raw", "settings"), tmp_path, capsys)
        assert found["store"] == {"name": "store", "outcome": "ok", "found": f"s3://{BUCKET}/store"}
        if example == "small":
            assert not {name for name, one in found.items() if one["outcome"] == "missing"} - {"disk"}
        else:
            assert found.keys() >= {"Prefect server", "Ray server", "MLflow server"}
            assert found["RAY_AUTH_TOKEN_PATH"]["outcome"] == "missing", "no machine has fetched one"
            check_secrets(terraform, state)
        terraform.run("destroy", "-no-color", "-auto-approve")
        check_gone(endpoint)
