"""Tests runs on an existing Ray cluster with a token and TLS. The supervisor runs on a different machine in each test.

    left: head, 1 CPU        right: 1 CPU        desk: joined without CPUs        stranger: no node

The clusters are started by `ray start`, as users do, with the dashboard that accepts jobs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults.test_machines import RECIPE, actors, rollflow, said, wait
from tests.support.certificates import make_certificates
from tests.support.machines import BUCKET, Machine, Machines, why_not
from tests.support.prefect_home import give

pytestmark = [pytest.mark.slow, pytest.mark.soak]

VERSIONS = 6
LONG_SECONDS = 600.0
TOKEN = "0123456789abcdef" * 4
NAMES = ("left", "right", "desk", "stranger")


class Attached:
    """The machines, their Ray cluster, and the environment variables of processes that use the cluster."""

    def __init__(self, machines: Machines, database: Path) -> None:
        every = [machines.machine(name, own_processes=True) for name in NAMES]
        self.left, self.right, self.desk, self.stranger = every
        self.address = f"{self.left.address}:6379"
        self.environments: dict[str, dict[str, str]] = {}
        for machine in every:
            home = machine.path(machine.home)
            made = make_certificates(home / "tls", [one.address for one in every])
            if machine is not self.left:  # all machines share one authority and one certificate
                for file in (home / "tls").iterdir():
                    file.write_bytes((self.left.path(self.left.home) / "tls" / file.name).read_bytes())
            tls = {name: value.replace(str(home), str(machine.home)) for name, value in made.ray.items()}
            self.environments[machine.name] = tls | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
            (home / "recipe.toml").write_text(RECIPE.replace("versions = 16", f"versions = {VERSIONS}"))
            give(database, home / "own")
        self.ray(self.left, "--head", "--port=6379", "--num-cpus=1", "--dashboard-host=0.0.0.0")
        self.ray(self.right, f"--address={self.address}", "--num-cpus=1")
        self.ray(self.desk, f"--address={self.address}", "--num-cpus=0")

    def ray(self, machine: Machine, *arguments: str) -> None:
        """Start a node as a user does, and wait until it is up."""
        place = [f"--node-ip-address={machine.address}", "--object-store-memory=100000000", "--disable-usage-stats"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *place]
        started = machine.start(command, **self.environments[machine.name])
        assert started.wait(LONG_SECONDS) == 0, machine.output()

    def run(self, machine: Machine, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine, with the variables for the cluster or, if given, with `environment` instead."""
        own = {"ROLLFLOW_HOME": str(machine.home / "own")}
        needed = environment or self.environments[machine.name]
        return machine.start(command, **own, **needed)

    def train(self, name: str) -> list[str]:
        """Return the command that trains a run of this name."""
        return rollflow("run", "recipe.toml", "--run-id", name, "--set", f"cluster.address={self.address}")


@pytest.fixture(scope="module")
def attached(prefect_database: Path) -> Iterator[Attached]:
    if reason := why_not():
        pytest.skip(reason)
    with Machines() as machines:
        yield Attached(machines, prefect_database)


def on_a_node(attached: Attached) -> tuple[Machine, list[str]]:
    return attached.left, attached.train("node")


def on_a_host_without_cpus(attached: Attached) -> tuple[Machine, list[str]]:
    return attached.desk, attached.train("desk")


def as_a_job(attached: Attached) -> tuple[Machine, list[str]]:
    """Submit the run as a job from the desk; Ray starts the job on the head, where a shell parses the command again."""
    home = attached.left.home
    train = " ".join([*rollflow("run", "recipe.toml", "--run-id", "job"), "--set cluster.address=$RAY_ADDRESS"])
    inside = f"cd {home} && ROLLFLOW_HOME={home}/own {train}"
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
    return attached.desk, [*submit, "--address", f"http://{attached.left.address}:8265", "--", "sh", "-c", inside]


PLACES: Mapping[str, Callable[[Attached], tuple[Machine, list[str]]]] = {
    "node": on_a_node,
    "desk": on_a_host_without_cpus,
    "job": as_a_job,
}


@pytest.mark.parametrize("name", PLACES)
def test_run_on_an_existing_cluster_trains_on_its_nodes(attached: Attached, name: str) -> None:
    machine, command = PLACES[name](attached)
    run = attached.run(machine, *command)
    used: dict[str, set[str]] = {one: set() for one in NAMES}

    def ended() -> bool:
        for one in (attached.left, attached.right, attached.desk):
            used[one.name] |= actors(one)
        return run.poll() is not None

    wait(ended, machine, "the end")
    assert run.returncode == 0, f"{machine.output()}\n{said(machine)}\n{said(attached.left)}"
    assert {"EngineActor"} <= used["left"] & used["right"], used
    assert used["desk"] == set(), used
    audit = attached.run(machine, *rollflow("audit", f"s3://{BUCKET}/store/runs/{name}", "--deep"))
    assert audit.wait(LONG_SECONDS) == 0, machine.output()


def test_refused_cluster_connection_gives_a_one_sentence_error(attached: Attached) -> None:
    """The commands `check` and `run` fail within seconds without a token, with a wrong token, without TLS, and on a
    machine that is not a node.
    """
    desk, address = attached.desk, attached.address
    own = attached.environments["desk"]
    without_token = {name: value for name, value in own.items() if not name.startswith("RAY_AUTH")}
    other_token = own | {"RAY_AUTH_TOKEN": "f" * 64}
    without_tls = {name: value for name, value in own.items() if not name.startswith("RAY_TLS")} | {"RAY_USE_TLS": "0"}
    cases = [
        (desk, without_token, f"cluster.address = '{address}': the cluster requires a token; set RAY_AUTH_MODE=token"),
        (
            desk,
            other_token,
            f"cluster.address = '{address}': the cluster requires another token than the token of this "
            "process; set RAY_AUTH",
        ),
        (desk, without_tls, "for a head with TLS set RAY_USE_TLS=1 and the certificates on this machine"),
        (
            attached.stranger,
            attached.environments["stranger"],
            "this machine is not one of the cluster's 3 nodes; let the machine",
        ),
    ]
    for machine, environment, sentence in cases:
        for verb in ("check", "run"):
            begun = attached.run(
                machine, *rollflow(verb, "recipe.toml", "--set", f"cluster.address={address}"), **environment
            )
            assert begun.wait(LONG_SECONDS) == 2, machine.output()
            assert sentence in machine.output(4), machine.output()


def test_doctor_checks_every_node(attached: Attached) -> None:
    command = rollflow("doctor", "--cluster", "recipe.toml", "--set", f"cluster.address={attached.address}")
    asked = attached.run(attached.desk, *command)
    assert asked.wait(LONG_SECONDS) in (0, 1), attached.desk.output()  # doctor returns 1 for a small disk
    shown = attached.desk.output(12)
    for machine in (attached.left, attached.right, attached.desk):
        assert f"{machine.address} " in shown, shown
    assert "did not answer" not in shown
