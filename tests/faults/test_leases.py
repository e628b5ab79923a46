"""Tests the leases of actors on a Ray cluster that the run does not own: no supervisor watches the run any longer.

Either all processes of the run except its actors are killed, or the supervisor is stopped. In both cases the actors end
and free their resources, and the run can be resumed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import find, kill_everything
from rollflow.flows.ray_cluster.ray_head import RayHead
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]
LEASE_SECONDS = 30.0
VERSIONS = 250  # so many versions that some are left when the lease has expired
LIVED_SECONDS = 10.0  # the actors live on for at least this time, because the supervisor may come back


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """Start a cluster that the run does not own, so that the run ends neither it nor its actors."""
    head = RayHead(tmp_path / "elsewhere", cpus=2, start_seconds=HANG_SECONDS)
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
    return [one for one in titles if "Actor" in one or "scorers.worker" in one]


@pytest.fixture
def victim(tmp_path: Path, others: RayHead) -> Iterator[Victim]:
    """Start a run on the cluster `others`. The run has so many versions that it is not finished when the lease has
    expired.
    """
    recipe = RECIPE.format(seed=3, versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    set_to = (f"cluster.address={others.address}", f"cluster.lease_seconds={LEASE_SECONDS:g}")
    victim = Victim(tmp_path / "home", recipe, *(f"--set={one}" for one in set_to))
    try:
        victim.wait_version(3, RUN_SECONDS)
        assert len(actors_on(others)) >= 6, actors_on(others)
        yield victim
    finally:
        kill_everything(victim.home)


def check_resume(victim: Victim) -> None:
    """Resume the run until its end, and check that no trajectory is lost or duplicated."""
    assert victim.version() < VERSIONS, "nothing is left to go on with"
    victim.process = victim._start("resume", "chaos")
    outcome = victim.finish([], RUN_SECONDS)
    assert outcome.right, outcome
    assert (outcome.lost, outcome.doubled) == (0, 0)


def test_run_without_supervisor_frees_its_actors_and_resumes(victim: Victim, others: RayHead) -> None:
    kill_everything(victim.home)
    victim.process.wait()
    killed = time.monotonic()
    assert len(actors_on(others)) >= 6, "the actors died with the runner, and nothing is shown here"
    until(lambda: not actors_on(others), HANG_SECONDS)
    freed = time.monotonic() - killed
    assert freed > LIVED_SECONDS
    print(f"freed {freed:.0f} s after the kill, at version {victim.newest}")
    check_resume(victim)


def test_blocked_supervisor_reports_that_its_actors_ended(victim: Victim, others: RayHead) -> None:
    """The supervisor is stopped for longer than the lease. When it wakes, it ends the run with one sentence."""
    [supervisor] = find(victim.home, "supervisor")
    supervisor.suspend()
    try:
        until(lambda: not actors_on(others), HANG_SECONDS)
        assert victim.process.poll() is None, victim.tail()
    finally:
        supervisor.resume()
    assert victim.process.wait(HANG_SECONDS) == 1, victim.tail()
    said = " ".join((victim.home / "output.log").read_text().replace("│", " ").split())
    print(said[-1000:])
    assert "no supervisor has watched" in said
    assert f"for {LEASE_SECONDS:g} s (cluster.lease_seconds), so the run's actors end; continue the run" in said
    assert "Traceback" not in said
    until(lambda: not actors_on(others), HANG_SECONDS)
    check_resume(victim)
