"""Tests leases: a run on a foreign cluster loses all processes but its actors, which then end and free resources."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import kill_everything
from rollflow.flows.services.ray_head import RayHead
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]
LEASE_SECONDS = 30.0
VERSIONS = 250  # so many versions that some are left when the lease has expired
LIVED_SECONDS = 10.0  # the shortest time that actors live on, because a supervisor may come back


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """Start a cluster that the run does not own, so that the run ends neither it nor its actors."""
    head = RayHead(tmp_path / "elsewhere", cpus=2)
    for name, value in head.env.items():
        monkeypatch.setenv(name, value)
    with head:
        yield head


def actors_on(head: RayHead) -> list[str]:
    """Return the run's actors on the cluster, and their child processes."""
    titles = []
    for pid in head.processes:
        with contextlib.suppress(psutil.Error):
            titles.append(" ".join(psutil.Process(pid).cmdline()).strip())
    return [one for one in titles if "Actor" in one or "verifiers.worker" in one]


def test_unwatched_run_frees_its_actors_and_is_resumed(tmp_path: Path, others: RayHead) -> None:
    recipe = RECIPE.format(seed=3, versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    set_to = (f"cluster.address={others.address}", f"cluster.lease_seconds={LEASE_SECONDS:g}")
    victim = Victim(tmp_path / "home", recipe, *(f"--set={one}" for one in set_to))
    try:
        victim.wait_version(3, RUN_SECONDS)
        assert len(actors_on(others)) >= 6, actors_on(others)
        kill_everything(victim.home)
        victim.process.wait()
        killed = time.monotonic()
        assert len(actors_on(others)) >= 6, "the actors died with the runner, and nothing is shown here"
        until(lambda: not actors_on(others), HANG_SECONDS)
        freed = time.monotonic() - killed
        assert freed > LIVED_SECONDS
        assert victim.version() < VERSIONS, "nothing is left to go on with"
        print(f"freed {freed:.0f} s after the kill, at version {victim.newest}")
        victim.process = victim._start("resume", "chaos")
        outcome = victim.finish([], RUN_SECONDS)
    finally:
        kill_everything(victim.home)
    assert outcome.right, outcome
    assert (outcome.lost, outcome.doubled) == (0, 0)
