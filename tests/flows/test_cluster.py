"""Tests that a connection to a Ray cluster waits for an absent Ray head, but only until a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollflow.flows.ray_cluster import cluster
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.services.process import free_port
from rollflow.storage.errors import Unreachable
from tests.support.waiting import HANG_SECONDS

ATTACH = """
import sys
from rollflow.flows.ray_cluster import cluster
print("waiting", flush=True)
with cluster.attached_cluster(sys.argv[1], "test", deadline_seconds=150):
    print(len(cluster.list_nodes()), flush=True)
"""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Install a clock that advances by a second each time it is read."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests in this process may be attached to a cluster
    monkeypatch.setattr(cluster.time, "monotonic", tick)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    return now


def test_connection_to_a_restarted_ray_head_is_retried(monkeypatch: pytest.MonkeyPatch, fast: list[float]) -> None:
    """The Ray head first refuses connections, then answers without being ready, then is ready."""
    trouble, connected = ["nothing answers", "nothing answers", "no raylet yet"], list[str]()

    def fail_or_not(at: int) -> None:
        if len(trouble) > at:
            raise Unreachable(trouble.pop())

    monkeypatch.setattr(cluster, "_check_head", lambda *_: fail_or_not(1))
    monkeypatch.setattr(cluster, "_keep_loopback", lambda _: None)
    monkeypatch.setattr(cluster, "_connect", lambda address, _: (fail_or_not(0), connected.append(address)))
    cluster.attach("127.0.0.1:1", "test", deadline_seconds=600)
    assert (trouble, connected) == ([], ["127.0.0.1:1"])


def test_error_names_an_absent_ray_head(fast: list[float]) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unreachable, match=f"nothing answers at {address} within 60 s"):
        cluster.attach(address, "test", deadline_seconds=60)
    assert fast[0] > 60


@pytest.mark.slow
def test_starting_flow_waits_for_an_absent_ray_head(tmp_path: Path) -> None:
    with RayHead(tmp_path, cpus=1) as head:
        env = os.environ | head.env | {"PYTHONPATH": os.pathsep.join(sys.path)}
        head.kill()
        command = [sys.executable, "-c", ATTACH, head.address]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "waiting\n"
            head.restart()
            said, _ = client.communicate(timeout=HANG_SECONDS)
        assert said == "1\n"
