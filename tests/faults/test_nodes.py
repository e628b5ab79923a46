"""One node of a two-node Ray cluster dies, as a machine that loses power: the run goes on with what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import kill_everything
from rollflow.flows.ray_head import RayHead, RayNode
from rollflow.storage.objects import open_store
from rollflow.storage.recoveries import RecoveryLog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VERSIONS = 120


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RayHead, RayNode]]:
    head = RayHead(tmp_path / "elsewhere", cpus=2)
    for name, value in head.env.items():
        monkeypatch.setenv(name, value)
    with head, RayNode(head, cpus=1) as node:
        yield head, node


def engines_on(node: RayNode) -> list[int]:
    """Processes of engine actors on a node."""
    return [pid for pid in node.processes if " ".join(psutil.Process(pid).cmdline()).startswith("ray::EngineActor")]


def test_the_other_node_goes_on(tmp_path: Path, two_nodes: tuple[RayHead, RayNode]) -> None:
    head, node = two_nodes
    recipe = RECIPE.format(seed=1, versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    victim = Victim(tmp_path / "home", recipe, "--set", f"cluster.address={head.address}")
    try:
        victim.wait_version(3, 300)
        assert len(engines_on(node)) == 1
        began = time.monotonic()
        node.kill()
        victim.wait_version(victim.version() + 3, 120)  # by then the engine of the dead node is missed
        print(f"three versions after {time.monotonic() - began:.1f} s")
        wait_recovered(tmp_path / "home")
        outcome = victim.finish([], 400)
    finally:
        kill_everything(victim.home)
    assert outcome.right, outcome
    assert (outcome.lost, outcome.doubled) == (0, 0)


def wait_recovered(home: Path) -> None:
    """Wait until the engine of the lost node was started again."""
    limit = time.monotonic() + 120
    log = RecoveryLog(open_store(str(home / "store/runs/chaos")))
    while not any(one.role.startswith("engine-") for one in log.read()):
        assert time.monotonic() < limit, log.read()
        time.sleep(0.2)
