"""Tests the leases of actors: the actors of a run without a supervisor end; those of a run that is watched, paused or
waiting for its store do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from rollflow.flows.ray_cluster import cluster
from rollflow.storage.objects import open_store
from rollflow.tasks.actors.channel import CHANNEL, start_channel
from rollflow.tasks.actors.learner import LEARNER, start_learner
from rollflow.tasks.actors.lease import ACTOR_SHARE, STATUS, Lease, LeaseWatch
from rollflow.tasks.actors.reward import REWARD, start_reward
from rollflow.tasks.actors.rollout import ROLLOUT, start_rollout
from rollflow.tasks.actors.run_engines import engine_name, start_engine
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.small_run import prepare_small
from tests.support.waiting import HANG_SECONDS, until

LEASE = Lease("memory://run", seconds=600.0, patience=3600.0)
PROCESS = """
import subprocess, sys, time
from rollflow.tasks.actors.lease import Lease
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Lease({uri!r}, 2.0, 60.0).hold("worker")
print(child.pid, flush=True)
while True:  # it works, and answers nobody
    sum(range(10**5))
"""


class Looks:
    """A watch of a lease, with a virtual clock; `status` is the content of the run's status file that the watch
    reads.
    """

    def __init__(self, lease: Lease = LEASE, share: float = 1.0) -> None:
        self.now, self.status = 0.0, b"0"
        self.watch = LeaseWatch(lease, lambda: self.status, lambda: self.now, share)  # type: ignore[arg-type]

    def run_out_after(self, seconds: float, step: float = 1.0) -> float | None:
        """Read the status every `step` seconds for `seconds` seconds; return the time after which the lease expired, or
        None.
        """
        began = self.now
        while self.now - began < seconds:
            self.now += step
            if self.watch.check_expiry():
                return self.now - began
        return None


def test_actor_lease_expires_while_the_run_status_is_unchanged() -> None:
    looks = Looks()
    found = looks.run_out_after(2000)
    assert found is not None
    assert 600 <= found <= 600 * 1.1


def test_changed_run_status_renews_the_lease_of_an_actor() -> None:
    looks = Looks()
    for count in range(10):
        looks.status = str(count).encode()
        assert looks.run_out_after(590) is None


def test_lease_of_zero_seconds_never_expires() -> None:
    assert Looks(Lease("memory://run", 0.0, 60.0)).run_out_after(1e6, step=1000.0) is None


def test_actor_of_a_run_without_a_status_has_a_lease() -> None:
    looks = Looks()
    looks.status = b""
    assert looks.run_out_after(2000) is not None


def test_actor_lease_ends_later_than_the_lease_of_its_flow() -> None:
    """If an actor ended before its flow, the flow would restart it. They read the status at different times, up to a
    twentieth of the lease apart.
    """
    for delay in range(30):
        flow, actor = Looks(), Looks(share=ACTOR_SHARE)
        flow.now += delay
        first, last = flow.run_out_after(2000), actor.run_out_after(2000)
        assert first is not None
        assert last is not None
        assert first + delay < last


def test_pause_of_an_actor_process_does_not_shorten_its_lease() -> None:
    """The machine was suspended, with the actor and the supervisor. The supervisor writes the status again a moment
    after the actor reads it.
    """
    looks = Looks()
    assert looks.run_out_after(100) is None
    looks.now += 86_400
    assert not looks.watch.check_expiry()
    assert looks.run_out_after(300) is None


def test_unreachable_store_extends_the_lease() -> None:
    looks = Looks()
    assert looks.run_out_after(500) is None
    looks.status = None  # type: ignore[assignment]
    assert looks.run_out_after(3000) is None
    looks.status = b"0"  # the store answers again, but the supervisor, which also waited for it, has not written yet
    assert looks.run_out_after(500) is None


def test_lease_expires_if_the_store_stays_unreachable() -> None:
    looks = Looks()
    looks.status = None  # type: ignore[assignment]
    found = looks.run_out_after(10_000)
    assert found is not None
    assert 4200 <= found <= 4300


def test_lease_uses_the_seconds_of_the_config(tmp_path: Path) -> None:
    tree = RunConfig(cluster={"lease_seconds": 30})  # type: ignore[arg-type]
    describe(open_store(str(tmp_path)), "run", tree)
    found = Lease.of(RunContext(str(tmp_path), tmp_path / "cache"))
    assert (found.uri, found.seconds, found.patience) == (str(tmp_path), 30.0, 3600.0)


def test_run_recorded_before_leases_existed_gets_a_lease(tmp_path: Path) -> None:
    describe(open_store(str(tmp_path)), "run", {"cluster": {"address": "10.0.0.1:6379"}})
    context = RunContext(str(tmp_path), tmp_path / "cache")
    assert Lease.of(context).seconds == 600.0
    assert context.config.cluster.placement == RunConfig().cluster.placement


@pytest.mark.long
def test_process_with_an_expired_lease_ends_with_its_children(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_bytes(b"1")
    command = [sys.executable, "-c", PROCESS.format(uri=str(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        child = psutil.Process(int(process.stdout.readline()))
        limit = time.monotonic() + 5.0
        while time.monotonic() < limit:  # while the status changes, the process lives
            (tmp_path / STATUS).write_bytes(os.urandom(8))
            assert process.poll() is None
            time.sleep(0.1)
        assert process.wait(HANG_SECONDS) == 1
        assert "worker: no supervisor has watched" in process.stderr.read()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_every_detached_actor_holds_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_node: None) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    context = prepare_small(tmp_path, cluster={"lease_seconds": 3})
    names = [CHANNEL, REWARD, ROLLOUT, LEARNER, engine_name(0)]
    started = [
        start_channel(context.store, 2, 0, Lease.of(context)).actor,
        start_reward(context),
        start_rollout(context, ""),
        start_learner(context, 0.0, ""),
        start_engine(context, 0, 0.0),
    ]
    try:
        until(lambda: all(is_gone(actor) for actor in started))
    finally:
        cluster.kill_named(names)


def is_gone(actor: ray.actor.ActorHandle) -> bool:
    """Return whether Ray reports that an actor is dead."""
    state = ray._private.state.actors(actor._actor_id.hex())
    return bool(state and state["State"] == "DEAD")
