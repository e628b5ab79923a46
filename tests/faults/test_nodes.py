"""Tests the sudden death of one node of a two-node Ray cluster: the run continues on the other node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import kill_everything
from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.recoveries import RecoveryLog
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]
VERSIONS = 250  # enough versions for the lost actors to restart before the run's end


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RayHead, RayNode]]:
    head = RayHead(tmp_path / "elsewhere", cpus=2)
    for name, value in head.env.items():
        monkeypatch.setenv(name, value)
    with head, RayNode(head, cpus=1) as node:
        yield head, node


def actors_on(node: RayNode) -> list[str]:
    """Return the run's actors on a node."""
    titles = []
    for pid in node.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            titles.append(" ".join(psutil.Process(pid).cmdline()).strip())
    return [title for title in titles if title.startswith("ray::") and "Actor" in title]


def test_run_survives_the_death_of_a_node(tmp_path: Path, two_nodes: tuple[RayHead, RayNode]) -> None:
    head, node = two_nodes
    recipe = RECIPE.format(seed=1, versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    victim = Victim(tmp_path / "home", recipe, "--set", f"cluster.address={head.address}")
    try:
        victim.wait_version(3, RUN_SECONDS)
        lost = actors_on(node)  # these include the second engine, because engines are spread over the nodes
        assert any("EngineActor" in one for one in lost), lost
        node.kill()
        victim.wait_version(
            victim.version() + 3, RUN_SECONDS
        )  # by then, the work that channel and scheduler had done before the kill is used up
        outcome = victim.finish([], RUN_SECONDS)
    finally:
        kill_everything(victim.home)
    assert outcome.right, outcome
    assert (outcome.lost, outcome.doubled) == (0, 0)
    recoveries = RecoveryLog(open_store(str(victim.home / "store/runs/chaos"))).read()
    print("\n".join(map(str, recoveries)))
    recovered = [one.role for one in recoveries]
    assert len(recovered) >= len(lost), recovered
