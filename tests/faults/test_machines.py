"""Tests a run on two machines without a shared disk: it loses one machine, continues, and its audit is clean."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rollflow.flows.ray_cluster.ray_head import NOTICE
from tests.support.machines import BUCKET, Machine, Machines, why_not
from tests.support.prefect_home import give

pytestmark = pytest.mark.slow

PORT = 6379
RUN = "store/runs/machines"
LONG_SECONDS = 300.0  # the longest wait for one part of a run; only a test that hangs waits so long
RECIPE = """
name = "machines"
versions = 16
async_ratio = 2
groups = 8
group_size = 4

[policy.cold_start]
hidden_size = 64
layers = 1
heads = 2
target_accuracy = 0.01
evaluate_every = 5

[engine]
kind = "transformers"
replicas = 2
max_concurrent_requests = 16
max_new_tokens = 8

[evaluation]
prompts = 8
every = 0

[recovery]
restarts = 20
backoff_seconds = 0.2

[store]
uri = "s3://machines/store"
"""
ALONE = ""
SPREAD = """
[train]
ranks = 2
spread = true
rank_seconds = 20
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := why_not():
        pytest.skip(reason)
    with Machines() as made:
        yield made


def join(machine: Machine, head: Machine | None) -> str:
    """Start Ray on a machine, as the head or as one more node; return the head's address."""
    address = f"{(head or machine).address}:{PORT}"
    role = ["--join", address] if head else ["--port", str(PORT)]
    place = ["--ip", machine.address, "--temp", "/tmp/ray", "--ready", str(machine.home / "ready")]
    size = ["--cpus", "1", "--object-store-bytes", str(100 << 20)]
    command = [sys.executable, "-m", "rollflow.flows.ray_cluster.ray_process", *role, *place, *size]
    nodes = [machine.start(command, **NOTICE)]

    def up() -> bool:
        if nodes[-1].poll() is not None:  # `ray start` waits only 30 s, too short for a slow machine
            nodes.append(machine.start(command, **NOTICE))
        return machine.path(machine.home / "ready").exists()

    wait(up, machine, f"Ray on {machine.name}")
    return address


def rollflow(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rollflow.flows.commands.cli", *arguments]


def cached(machine: Machine) -> set[int]:
    """Return the versions whose weights are cached on a machine, in any of its own folders."""
    top = machine.path("/home")
    found = (re.match(r"(\d{8})-", path.parent.name) for path in top.rglob("*.safetensors"))
    return {int(one[1]) for one in found if one}


def actors(machine: Machine) -> set[str]:
    """Return the kinds of actors that run on a machine."""
    titles = []
    for process in machine.processes():
        with contextlib.suppress(psutil.Error):
            titles.append(" ".join(process.cmdline()))
    return {found[1] for title in titles if (found := re.match(r"ray::(\w+Actor)\b", title))}


@pytest.mark.soak
@pytest.mark.parametrize("train", [ALONE, SPREAD], ids=["alone", "spread"])
def test_run_trains_on_machines_without_a_shared_disk(machines: Machines, prefect_database: Path, train: str) -> None:
    """At every weight update, the engine on the machine without the learner must give the learner's log-probabilities.

    If the learner's ranks are spread over the machines, one rank dies with the lost machine.
    """
    left, right = machines.machine("left"), machines.machine("right")
    address = join(left, None)
    join(right, left)
    left.path(left.home / "recipe.toml").write_text(RECIPE + train)
    give(prefect_database, left.path(left.home / "own"))
    refused = left.start(
        rollflow("run", "recipe.toml", "--set", f"cluster.address={address}", "--set", "store.uri=own/store")
    )
    assert refused.wait(LONG_SECONDS) == 2, left.output()
    assert f"store.uri = '{left.home}/own/store' is a folder of this machine, which {right.address} of" in left.output()
    run = left.start(
        rollflow("run", "recipe.toml", "--run-id", "machines", "--set", f"cluster.address={address}"),
        ROLLFLOW_HOME=str(left.home / "own"),
    )

    def version() -> int:
        assert run.poll() is None, f"the run ended (exit code {run.returncode}):\n{left.output()}\n{said(left)}"
        staged = {int(key.split("/policies/")[1].split("/")[0]) for key in machines.objects(f"{RUN}/policies")}
        return max(staged, default=0) - 1  # a version is staged after the previous version is published

    wait(lambda: version() >= 3 and len(cached(right)) >= 2, left, "both machines to work")
    lost = actors(right)
    assert {"EngineActor"} <= lost & actors(left), "one of the two is not on the learner's machine"
    assert train == ALONE or {"LearnerActor", "RankActor"} & lost, "no rank is on the machine that is lost"
    began, before = time.monotonic(), version()
    right.lose_power()
    wait(lambda: version() >= before + 4, left, "versions after one machine was lost")
    print(f"without {', '.join(lost)}: four versions after {time.monotonic() - began:.1f} s, from {before} on")
    wait(lambda: run.poll() is not None, left, "the end")
    assert run.returncode == 0, left.output()
    audit = left.start(rollflow("audit", f"s3://{BUCKET}/{RUN}", "--deep"))
    assert audit.wait(LONG_SECONDS) == 0, left.output()


def said(machine: Machine) -> str:
    """Return the end of the flow logs on a machine."""
    logs = sorted((machine.path(machine.home) / "own/logs").rglob("*.log"))
    return "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-60:])


def wait(reached: Callable[[], bool], machine: Machine, what: str) -> None:
    limit = time.monotonic() + LONG_SECONDS
    while not reached():
        assert time.monotonic() < limit, f"waited {LONG_SECONDS:g} s for {what}:\n{machine.output()}\n{said(machine)}"
        time.sleep(0.5)  # wait, because each check sends a request to the S3 server
