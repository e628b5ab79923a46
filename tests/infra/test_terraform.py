"""Tests Terraform's plan of the cluster: all resources are encrypted, private and tagged, and the plan has no
unexplained wildcards and no secrets.

The module `test_terraform_apply.py` plans and applies both Terraform examples.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands.cli.settings import load_settings
from tests.support.terraform import (
    PLANTED,
    SOURCE,
    resources,
    script,
    statements,
    variable_blocks,
    why_not,
)

FILES = sorted(SOURCE.rglob("*.tf"))
WILDCARD = re.compile(r'"[^"]*\*[^"]*"')

pytestmark = pytest.mark.xdist_group("terraform")
needs_terraform = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_all_terraform_modules_exist() -> None:
    modules = {path.parent.name for path in FILES if path.parent.parent.name == "modules"}
    assert modules >= {"bucket", "network", "ray", "control", "access", "budget"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_terraform_variables_have_description_and_validation(file: Path) -> None:
    for name, body in variable_blocks(file.read_text()).items():
        assert re.search(r"^  description += \"[A-Za-z`].*\.\"$", body, flags=re.MULTILINE), name
        assert re.search(r"^  validation \{", body, flags=re.MULTILINE), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_terraform_wildcards_have_a_written_reason(file: Path) -> None:
    for line in file.read_text().splitlines():
        if re.match(r"\s*(actions|resources|identifiers)\s*=", line) and WILDCARD.search(line):
            assert re.search(r"# wildcard: \w+", line), line


@needs_terraform
def test_terraform_files_are_formatted() -> None:
    done = subprocess.run(["terraform", "fmt", "-check", "-recursive", str(SOURCE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@needs_terraform
@pytest.mark.long
class TestPlan:
    """Tests of the plan's JSON for each property that the module's docstring names."""

    def test_every_aws_resource_is_tagged(self, plan: dict[str, Any]) -> None:
        asked = 0
        for address, after in resources(plan).items():
            if "tags_all" in after:
                assert after["tags_all"].get("rollflow") == "rollflow", address
                asked += 1
        assert asked > 30
        for address, group in resources(plan, "aws_autoscaling_group").items():
            tags = {tag["key"]: tag for tag in group["tag"]}
            assert tags["rollflow"]["propagate_at_launch"], address
        for address, template in resources(plan, "aws_launch_template").items():
            tagged = {one["resource_type"] for one in template["tag_specifications"] if "rollflow" in one["tags"]}
            assert tagged == {"instance", "volume", "network-interface"}, address

    def test_stored_aws_data_is_encrypted(self, plan: dict[str, Any]) -> None:
        (bucket,) = resources(plan, "aws_s3_bucket_server_side_encryption_configuration").values()
        assert bucket["rule"][0]["apply_server_side_encryption_by_default"][0]["sse_algorithm"] == "AES256"
        (database,) = resources(plan, "aws_db_instance").values()
        assert database["storage_encrypted"]
        machines = resources(plan, "aws_instance")
        assert len(machines) == 2
        for address, machine in machines.items():
            assert [disk["encrypted"] for disk in machine["root_block_device"]] == [True], address
        templates = resources(plan, "aws_launch_template")
        assert len(templates) == 2
        for address, template in templates.items():
            assert [one["ebs"][0]["encrypted"] for one in template["block_device_mappings"]] == ["true"], address

    def test_database_and_bucket_traffic_is_encrypted(self, plan: dict[str, Any]) -> None:
        (database,) = resources(plan, "aws_db_parameter_group").values()
        assert {one["name"]: one["value"] for one in database["parameter"]} == {"rds.force_ssl": "1"}
        (policy,) = resources(plan, "aws_s3_bucket_policy").values()
        (statement,) = json.loads(policy["policy"])["Statement"]
        assert (statement["Effect"], statement["Action"], statement["Principal"]) == ("Deny", "s3:*", "*")
        assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
        assert len(statement["Resource"]) == 2

    def test_no_aws_resource_is_public(self, plan: dict[str, Any]) -> None:
        (block,) = resources(plan, "aws_s3_bucket_public_access_block").values()
        settings = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
        assert all(block[name] for name in settings)
        (ownership,) = resources(plan, "aws_s3_bucket_ownership_controls").values()
        assert ownership["rule"][0]["object_ownership"] == "BucketOwnerEnforced"
        (database,) = resources(plan, "aws_db_instance").values()
        assert database["publicly_accessible"] is False
        for machine in resources(plan, "aws_instance").values():
            assert machine["associate_public_ip_address"] is False
            assert machine["metadata_options"][0]["http_tokens"] == "required"
        for template in resources(plan, "aws_launch_template").values():
            assert template["network_interfaces"][0]["associate_public_ip_address"] == "false"
            assert template["metadata_options"][0]["http_tokens"] == "required"
        for subnet in resources(plan, "aws_subnet").values():
            assert subnet["map_public_ip_on_launch"] is False

    def test_only_own_security_groups_may_connect(self, plan: dict[str, Any]) -> None:
        rules = resources(plan, "aws_vpc_security_group_ingress_rule")
        assert {rule["from_port"] for rule in rules.values()} == {1024, 5432}
        for address, rule in rules.items():
            assert rule["cidr_ipv4"] is rule["cidr_ipv6"] is rule["prefix_list_id"] is None, address
            assert rule["ip_protocol"] == "tcp", address
        for kind in ("aws_security_group", "aws_default_security_group"):
            for group in resources(plan, kind).values():
                assert not group.get("ingress"), "a rule is a resource of its own"
        assert not resources(plan, "aws_security_group_rule")

    def test_bucket_keeps_and_expires_old_object_versions(self, plan: dict[str, Any]) -> None:
        (versioning,) = resources(plan, "aws_s3_bucket_versioning").values()
        assert versioning["versioning_configuration"][0]["status"] == "Enabled"
        (lifecycle,) = resources(plan, "aws_s3_bucket_lifecycle_configuration").values()
        uploads, pruned = lifecycle["rule"]
        assert (uploads["status"], pruned["status"]) == ("Enabled", "Enabled")
        assert uploads["abort_incomplete_multipart_upload"][0]["days_after_initiation"] == 7
        assert pruned["noncurrent_version_expiration"][0]["noncurrent_days"] == 14
        assert not [rule for rule in lifecycle["rule"] if any(one.get("days") for one in rule["expiration"])], (
            "no rule may expire what a run needs"
        )

    def test_iam_policies_have_no_unexplained_wildcard(self, plan: dict[str, Any]) -> None:
        explained = set()
        for file in FILES:
            sid = ""
            for line in file.read_text().splitlines():
                sid = next(iter(re.findall(r'^\s*sid\s*= "(\w+)"', line)), sid)
                if "# wildcard:" in line:
                    explained.add(sid)
        given = list(statements(plan))
        sids = {statement["sid"] for _, statement in given}
        assert sids >= {
            "ListStore",
            "UseStore",
            "ReadSecrets",
            "WriteSecrets",
            "SessionManager",
            "ReadDatabasePassword",
        }
        assert explained <= sids
        for address, statement in given:
            principals = [name for one in statement["principals"] or () for name in one["identifiers"]]
            named = [*(statement["actions"] or ()), *(statement["resources"] or ()), *principals]
            if any(name and "*" in name for name in named):
                assert statement["sid"] in explained, address
            if statement["effect"] != "Deny":
                assert not [name for name in statement["actions"] if "*" in name], address
            assert not statement["not_actions"], address
            assert not statement["not_resources"], address

    def test_iam_roles_have_minimal_permissions(self, plan: dict[str, Any]) -> None:
        actions: dict[str, set[str]] = {}
        for address, statement in statements(plan):
            actions.setdefault(address, set()).update(statement["actions"])
        prefix = "module.access.data.aws_iam_policy_document.machine"
        node, control = actions[f'{prefix}["node"]'], actions[f'{prefix}["control"]']
        assert actions[f'{prefix}["head"]'] - node == {"secretsmanager:PutSecretValue", "cloudwatch:PutMetricData"}
        assert node == control
        assert {action for action in node if action.startswith("s3:")} == {
            *("s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads"),
            *("s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
            *("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
        }

    def test_rollout_machines_are_spot_instances_that_autoscale(self, plan: dict[str, Any]) -> None:
        group = resources(plan, "aws_autoscaling_group")["module.ray.aws_autoscaling_group.rollout"]
        (policy,) = group["mixed_instances_policy"]
        (distribution,) = policy["instances_distribution"]
        assert distribution["on_demand_percentage_above_base_capacity"] == distribution["on_demand_base_capacity"] == 0
        assert (group["min_size"], group["max_size"]) == (1, 4)
        assert {alarm["metric_name"] for alarm in resources(plan, "aws_cloudwatch_metric_alarm").values()} == {
            "GpusWaiting",
            "GpusWanted",
        }

    def test_terraform_plan_contains_no_secrets(self, plan: dict[str, Any]) -> None:
        text = json.dumps(plan)
        for secret in PLANTED.values():
            assert secret not in text
        scripts = {**resources(plan, "aws_launch_template"), **resources(plan, "aws_instance")}
        read = {address: script(after) for address, after in scripts.items() if "control" not in address}
        assert len(read) == 3
        for address, body in read.items():
            assert "rollflow-ray-credentials /run/rollflow-ray $address rollflow/ray-token" in body, address
            assert not [secret for secret in PLANTED.values() if secret in body], address

    def test_rollflow_reads_the_settings_that_terraform_writes(self, plan: dict[str, Any], tmp_path: Path) -> None:
        file = tmp_path / "settings.toml"
        file.write_text(plan["planned_values"]["outputs"]["settings"]["value"])
        settings = load_settings(file)
        assert settings.variables["ROLLFLOW_STORE"] == "s3://rollflow-tests/store"
        assert settings.config.cluster.address == "10.42.0.10:6379"
        placement = settings.config.cluster.placement
        bodies = "".join(script(after) for after in resources(plan, "aws_launch_template").values())
        for role, resource in ((placement.engine, "rollout"), (placement.learner, "train")):
            assert role.resource == resource
            assert f'"--resources={{\\"{resource}\\":1}}"' in bodies
        assert settings.config.tracking.uri == "http://127.0.0.1:5000"
        assert settings.variables["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
        assert settings.variables["RAY_USE_TLS"] == "1"
