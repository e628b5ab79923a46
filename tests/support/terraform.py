"""Runs Terraform in a copy of `infra/terraform`, against a moto server. Nothing is downloaded, and AWS is not
contacted.

The provider comes from a folder that `terraform providers mirror /opt/tf-plugins` fills; `ROLLFLOW_TF_PLUGINS` names
another folder.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.aws_server import variables

SOURCE = Path(__file__).resolve().parents[2] / "infra" / "terraform"
PLUGINS = Path(os.environ.get("ROLLFLOW_TF_PLUGINS", "/opt/tf-plugins"))
VERSION = "5.100.0"
HANG_SECONDS = 600
IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"  # moto has no images with a GPU driver
BUCKET = "rollflow-tests"
PLANTED: Mapping[str, str] = {"ray_token": "planted-ray-token-4711", "prefect_password": "planted-password-4711"}
GIVEN: Mapping[str, object] = {
    "region": "eu-central-1",
    "bucket": BUCKET,
    "dollars_per_month": 500,
    "emails": ["team@example.com"],
    "delete_runs_on_destroy": True,
}
EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "small": {"image_parameter": IMAGE},
    "cluster": {
        "gpu_image_parameter": IMAGE,
        "rollout": {"instance_types": ["g6e.xlarge", "g6.2xlarge"], "gpus": 1, "min": 1, "max": 4},
    },
}


def why_not() -> str:
    """Return why Terraform cannot run here; "" if it can."""
    if shutil.which("terraform") is None:
        return "terraform is not installed"
    if not [*PLUGINS.glob(f"registry.terraform.io/hashicorp/aws/**/*{VERSION}*")]:
        return f"the AWS provider {VERSION} is not in {PLUGINS} (terraform providers mirror {PLUGINS})"
    return ""


@dataclass
class Terraform:
    """An example of `infra/terraform` in its own folder, and the server to which it is applied."""

    folder: Path
    endpoint: str
    secrets: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a Terraform command that must end with this exit code; return its output, or its errors."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))}
        own = {"TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": os.devnull}
        secret = {f"TF_VAR_{name}": value for name, value in self.secrets.items()}
        done = subprocess.run(
            ["terraform", *arguments],
            cwd=self.folder,
            env={**inherited, **own, **secret, **variables(self.endpoint)},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    def plan(self) -> dict[str, Any]:
        """Return the plan as JSON; `apply` applies it."""
        self.run("plan", "-no-color", "-out=plan")
        plan: dict[str, Any] = json.loads(self.run("show", "-json", "plan"))
        return plan

    def apply(self) -> dict[str, Any]:
        """Apply the plan; return the state as JSON."""
        self.run("apply", "-no-color", "plan")
        state: dict[str, Any] = json.loads(self.run("show", "-json"))
        return state


def prepare(
    example: str, folder: Path, endpoint: str, secrets: Mapping[str, str] | None = None, **changed: object
) -> Terraform:
    """Copy the modules and an example, with values for its variables (`changed` wins), and initialise it."""
    copy = folder / "terraform"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*", "*.tfvars"))
    wheel, pins = folder / "rollflow-0-py3-none-any.whl", folder / "pins.txt"
    wheel.write_bytes(b"a wheel")
    pins.write_text("rollflow==0\n")
    given = {**GIVEN, **EXAMPLES[example], "wheel": str(wheel), "pins": str(pins), **changed}
    terraform = Terraform(copy / "examples" / example, endpoint, secrets or {})
    (terraform.folder / "tests.auto.tfvars.json").write_text(json.dumps(given))
    terraform.run("init", "-no-color", f"-plugin-dir={PLUGINS}")
    return terraform


def resources(plan: Mapping[str, Any], kind: str = "") -> dict[str, dict[str, Any]]:
    """Return the planned attributes of managed resources (of one type), by address."""
    return {
        one["address"]: one["change"]["after"]
        for one in plan["resource_changes"]
        if one["mode"] == "managed" and kind in ("", one["type"])
    }


def statements(plan: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every statement of every policy, with the address of its document."""
    for one in plan["resource_changes"]:
        if one["type"] == "aws_iam_policy_document":
            yield from ((one["address"], statement) for statement in one["change"]["after"]["statement"])
    for one in _read(plan["prior_state"]["values"]["root_module"]):
        if one["type"] == "aws_iam_policy_document":
            yield from ((one["address"], statement) for statement in one["values"]["statement"])


def _read(module: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from module.get("resources", ())
    for child in module.get("child_modules", ()):
        yield from _read(child)


def state_resources(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the attributes of all resources in a state, by address."""
    return {one["address"]: one["values"] for one in _read(state["values"]["root_module"])}


def script(attributes: Mapping[str, Any]) -> str:
    """Return the user data of a machine or of a launch template."""
    return gzip.decompress(base64.b64decode(attributes.get("user_data_base64") or attributes["user_data"])).decode()


def variable_blocks(text: str) -> dict[str, str]:
    """Return the body of each `variable` block of a file, by name."""
    return dict(re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', text, flags=re.DOTALL | re.MULTILINE))
