"""Reads the scripts of the AWS machines as Terraform renders them, and runs their credentials script with a stand-in
for the command `aws`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.terraform import resources, script

REGION = "eu-central-1"
CREDENTIALS = ("rollflow/ray-token", "rollflow/ray-authority")

# Stand-in for two calls of the AWS command line, with its exit code for a refused request.
AWS = f"""#!{sys.executable}
import sys
import boto3
from botocore.exceptions import ClientError
client = boto3.client("secretsmanager", region_name="{REGION}")
_, verb, _, secret, _, value, *_ = sys.argv[1:]
try:
    if verb == "get-secret-value":
        print(client.get_secret_value(SecretId=secret)["SecretString"])
    else:
        client.put_secret_value(SecretId=secret, SecretString=open(value.removeprefix("file://")).read())
except ClientError as error:
    print(error, f"({{error.response['Error']['Code']}})", file=sys.stderr)
    sys.exit(254)
"""


def program(body: str, name: str) -> str:
    """Return the program that user data writes to the file of that name."""
    found = re.search(rf"^cat > \S*/{name} <<'PROGRAM'\n(.*?)^PROGRAM$", body, flags=re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


def variables(body: str) -> dict[str, str]:
    """Return the environment of the machine's services."""
    found = re.search(r"^cat > /etc/rollflow/variables <<'VARIABLES'\n(.*?)^VARIABLES$", body, re.DOTALL | re.MULTILINE)
    assert found
    return dict(re.findall(r"^(\w+)=(.*)$", found[1], flags=re.MULTILINE))


def ray_options(body: str) -> list[str]:
    """Return the options of `ray start`, as systemd reads them; `$address` stands for the machine's own address."""
    found = re.search(r"^ExecStart=/opt/rollflow/bin/ray start (.*)$", body, flags=re.MULTILINE)
    assert found
    return shlex.split(found[1])


def user_data(plan: dict[str, Any]) -> dict[str, str]:
    """Return the user data scripts that a plan contains, by kind of machine. The script of the control machine names a
    secret that RDS creates.
    """
    found = {**resources(plan, "aws_launch_template"), **resources(plan, "aws_instance")}
    kinds = {"head": "module.head", "rollout": '["rollout"]', "train": '["train"]'}
    return {kind: script(next(one for at, one in found.items() if part in at)) for kind, part in kinds.items()}


def fetch(body: str, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run the credentials script of a machine's user data in a new folder."""
    folder.mkdir()
    file = folder.parent / f"{folder.name}.sh"
    file.write_text(program(body, "rollflow-ray-credentials"))
    command = ["bash", str(file), str(folder), address, *CREDENTIALS]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
