"""Tests Ray with the credentials that the start script of the AWS machines creates: two nodes, a driver, and refused
drivers.

The machines are network namespaces with addresses of their own. On loopback, a plain `ray.init` would hang: Ray takes
127.0.0.1 for the external address of the machine, at which the head does not listen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands.cli.settings import load_settings
from tests.support import terraform
from tests.support.certificates import make_certificates
from tests.support.machine_scripts import fetch, ray_options, user_data, variables
from tests.support.machines import Machine, Machines, why_not
from tests.support.waiting import RUN_SECONDS, until

missing = terraform.why_not() or why_not()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("terraform"),
    pytest.mark.skipif(bool(missing), reason=missing),
]

HEAD_ADDRESS = "10.42.0.10"
FOLDER = "/run/rollflow-ray"
ASK = """
import json, sys
from rollflow.flows.ray_cluster import cluster, ray_access
from rollflow.flows.services.reachability import check_ray
from rollflow.storage.errors import RollflowError

address, answer = sys.argv[1:]
try:
    check_ray(address)
    ray_access.check_membership(address)
    with cluster.attached_cluster(address, "credentials"):
        import ray

        on_rollout = ray.remote(resources={"rollout": 1})(lambda: ray.util.get_node_ip_address())
        said = [sorted(node["NodeManagerAddress"] for node in ray.nodes()), ray.get(on_rollout.remote(), timeout=120)]
except RollflowError as error:
    said = f"{type(error).__name__}: {error}"
with open(answer, "w") as file:
    json.dump(said, file)
"""


class Deployment:
    """The head and one rollout machine of Terraform's plan, each with credentials that the machine's own start script
    created.
    """

    def __init__(self, machines: Machines, plan: dict[str, Any], folder: Path) -> None:
        self.head, self.rollout = (machines.machine(name, own_processes=True) for name in ("head", "rollout"))
        self.address = f"{self.head.address}:6379"
        for machine, body in ((self.head, user_data(plan)["head"]), (self.rollout, user_data(plan)["rollout"])):
            made = fetch(body, folder / machine.name, machine.address)
            assert made.returncode == 0, made.stderr
            self.copy(folder / machine.name, machine, "ray")
            options = [
                option.replace("$address", machine.address).replace(HEAD_ADDRESS, self.head.address)
                for option in ray_options(body)
            ]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus=1"]
            command += ["--object-store-memory=100000000"]
            command += ["--include-dashboard=false"] if machine is self.head else []  # Ray accepts it only for a head
            as_systemd = ["sh", "-c", 'until "$@"; do sleep 1; done', "sh", *command]  # `Restart=always`
            machine.start(as_systemd, **self.environment(machine, variables(body)))

    def copy(self, source: Path, machine: Machine, name: str) -> Path:
        """Copy a folder of credentials into a machine's home, and return its path there."""
        target = machine.path(machine.home / name)
        target.mkdir()
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return machine.home / name

    def environment(self, machine: Machine, named: dict[str, str]) -> dict[str, str]:
        """Return the variables in `named` that belong to Ray, with the path of the machine's folder of credentials."""
        own = {name: value for name, value in named.items() if name.startswith("RAY_")}
        return {name: value.replace(FOLDER, f"{machine.home}/ray") for name, value in own.items()}

    def ask(self, environment: dict[str, str]) -> Any:
        """Start a driver on the head's machine that joins the cluster; return what the driver saw, or why it was
        refused.
        """
        answer = self.head.home / "answer"
        self.head.path(answer).unlink(missing_ok=True)
        asked = self.head.start([sys.executable, "-c", ASK, self.address, str(answer)], **environment)
        assert asked.wait(RUN_SECONDS) == 0, self.head.output()
        return json.loads(self.head.path(answer).read_text())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates of another certificate authority."""
    folder = tmp_path_factory.mktemp("other")
    make_certificates(folder)
    return folder


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Start simulated machines before the fixture `secrets` sets variables, because the machines have an S3 server of
    their own.
    """
    with Machines() as machines:
        yield machines


@pytest.fixture
def deployment(machines: Machines, plan: dict[str, Any], tmp_path: Path, secrets: Any) -> Deployment:
    return Deployment(machines, plan, tmp_path)


def test_ray_accepts_a_client_with_the_credentials(
    deployment: Deployment, plan: dict[str, Any], tmp_path: Path, certificates: Path
) -> None:
    head, rollout = deployment.head, deployment.rollout
    file = tmp_path / "settings.toml"
    file.write_text(plan["planned_values"]["outputs"]["settings"]["value"])
    own = deployment.environment(head, dict(load_settings(file).variables))
    wanted = [sorted([head.address, rollout.address]), rollout.address]

    def joined() -> bool:
        print(said := deployment.ask(own))
        return bool(said == wanted)

    until(joined, RUN_SECONDS)

    named = f"cluster.address = '{deployment.address}'"
    without_token = {name: value for name, value in own.items() if not name.startswith("RAY_AUTH")}
    without_tls = {name: value for name, value in own.items() if "TLS" not in name}
    other = deployment.copy(certificates, head, "other")
    stranger = {"RAY_TLS_SERVER_CERT": f"{other}/machine.crt", "RAY_TLS_SERVER_KEY": f"{other}/machine.key"}
    assert deployment.ask(without_token).startswith(f"ConfigError: {named}: the cluster requires a token;")
    other_token = without_token | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    assert deployment.ask(other_token).startswith(f"ConfigError: {named}: the cluster requires another token")
    assert "for a head with TLS set RAY_USE_TLS=1 and the certificates on this machine" in deployment.ask(without_tls)
    for changed, words in (
        (stranger, "or accepts no certificate such as RAY_TLS_SERVER_CERT"),
        ({"RAY_TLS_CA_CERT": f"{other}/ca.crt"}, "TLS with the Ray head failed"),
    ):
        said = deployment.ask(own | changed)
        assert said.startswith(f"ConfigError: {named} and RAY_USE_TLS = '1': "), said
        assert words in said
