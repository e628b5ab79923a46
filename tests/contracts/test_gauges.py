"""Tests of a run's metrics for Prometheus: a real Ray node serves the numbers of the actors' statuses, and the
dashboard shows these numbers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rollflow.storage.run_records.environment_figures import EnvironmentUse
from rollflow.storage.run_records.sandbox_figures import SandboxFigures, SandboxUse
from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.actors.gauges import read_figures
from rollflow.tasks.actors.statuses import LearnerStatus, RewardStatus, RolloutStatus
from tests.support.waiting import RUN_SECONDS

WATCHING = Path("infra/watching")
STATUSES = {"rollout": RolloutStatus, "reward": RewardStatus, "learner": LearnerStatus}

# This code runs in a separate process, because Ray reads the environment when Ray is imported.
SCRAPED = """
import os, sys, time, urllib.request
from collections.abc import Mapping
from pathlib import Path
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.ray_cluster import cluster

class Head(RayHead):
    @property
    def node_env(self):
        return {**super().node_env, "RAY_enable_metrics_collection": sys.argv[2]}

with Head(Path(sys.argv[1]), cpus=1) as head:
    os.environ.update(head.env)
    with cluster.attached_cluster(head.address, "gauges"):
        import ray
        from rollflow.tasks.actors.gauges import Gauges
        from rollflow.tasks.actors.statuses import RolloutStatus

        @ray.remote(num_cpus=0)
        class Told:
            def __init__(self):
                self.gauges = Gauges("rollout", "s3://bucket/runs/run-1")

            def tell(self, running, discards):
                self.gauges.show(RolloutStatus(running=running, discards=discards))
                return self.gauges.on

        told = Told.remote()
        on = ray.get(told.tell.remote(3, {"stale": 5}))
        ray.get(told.tell.remote(7, {}))
        port = ray.nodes()[0]["MetricsExportPort"]
        limit = time.monotonic() + float(sys.argv[3])
        found = []
        while on and time.monotonic() < limit:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
            found = [line for line in page.splitlines() if line.startswith("ray_rollflow_rollout_")]
            if any("_discards" in line for line in found) and any("_running" in line for line in found):
                break
            time.sleep(1)
        print(on)
        print(*found, sep="\\n")
"""


def scraped(home: Path, switch: str) -> list[str]:
    command = [sys.executable, "-c", SCRAPED, str(home), switch, str(RUN_SECONDS / 4)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_SECONDS)
    return done.stdout.splitlines()


@pytest.mark.soak
@pytest.mark.slow
def test_ray_node_exports_the_gauges_of_an_actor(tmp_path: Path) -> None:
    """A gauge that the actor no longer reports becomes zero."""
    on, *lines = scraped(tmp_path, "1")
    assert on == "True"
    values = {re.sub(r"\{.*", "", line): float(line.split()[-1]) for line in lines if 'run="run-1"' in line}
    assert values["ray_rollflow_rollout_running"] == 7
    assert [float(line.split()[-1]) for line in lines if 'what="stale"' in line] == [0.0]


@pytest.mark.soak
def test_gauges_are_off_if_ray_exports_no_metrics(tmp_path: Path) -> None:
    assert scraped(tmp_path, "0")[0] == "False"


def test_every_number_of_the_run_status_is_a_ray_gauge() -> None:
    status = RolloutStatus(
        costs=[CpuCost("engine", "a", 1.0), CpuCost("engine", "b", 2.0)],
        waits_for="storage",
        discards={"stale": 2},
        failed={1: "died"},
        environments=[EnvironmentUse("a", "trl", {"steps": 3.0})],
        sandboxes=[SandboxUse(name, "rock", SandboxFigures(2, ends={"memory": 1})) for name in "ab"],
    )
    found = {(name, what): value for name, what, value in read_figures(status)}
    assert found["cpu_seconds", "engine"] == 3.0
    assert found["waits", ""] == found["failed", "1"] == 1.0
    assert found["discards", "stale"] == 2.0
    assert found["environments", "trl steps"] == 3.0
    assert found["sandboxes", "rock started"] == 4.0
    assert found["sandboxes", "rock killed_memory"] == found["sandboxes", "rock programs"] == 2.0
    told = {name for name, _ in found}
    assert {one.name for one in fields(status)} - told <= {"costs", "waits_for", "filtered", "warned"}


def test_dashboard_uses_existing_gauges() -> None:
    board = json.loads((WATCHING / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ray_rollflow_\w+", target["expr"])
    }
    there = {f"ray_rollflow_{role}_{one.name}" for role, status in STATUSES.items() for one in fields(status)}
    there |= {f"ray_rollflow_{role}_{name}" for role in STATUSES for name in ("waits", "cpu_seconds", "metric")}
    assert asked
    assert asked <= there
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
