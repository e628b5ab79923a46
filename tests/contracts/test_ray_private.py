"""Tests Ray's private API as `ray_process` and `cluster.attach` use it, so that a test fails if Ray changes this
API.
"""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import os
import signal
from pathlib import Path

import psutil
import pytest
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray._private.parameter import RayParams

from rollflow.flows.ray_cluster.ray_head import RayHead
from tests.support.waiting import until

PARAMETERS = {
    "node_ip_address", "num_cpus", "num_gpus", "resources", "object_store_memory", "temp_dir", "include_dashboard",
    "include_log_monitor", "no_monitor", "worker_path", "dashboard_agent_listen_port", "gcs_address", "gcs_server_port",
}  # fmt: skip


def test_ray_accepts_the_parameters_of_a_private_node() -> None:
    assert set(inspect.signature(RayParams).parameters) >= PARAMETERS
    assert set(inspect.signature(Node).parameters) >= {"ray_params", "head", "shutdown_at_exit", "spawn_reaper"}
    left_out = inspect.signature(Node.start_api_server).parameters.values()
    assert [(one.name, one.kind) for one in left_out][1:] == [
        ("include_dashboard", inspect.Parameter.KEYWORD_ONLY),
        ("raise_on_failure", inspect.Parameter.KEYWORD_ONLY),
    ]


def test_ray_uses_loopback_if_clusters_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    monkeypatch.setattr(worker, "_global_node", None)  # another test in this process may have set a node
    assert services.get_node_ip_address() == "127.0.0.1"
    assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"


def named(head: RayHead) -> list[tuple[str, int]]:
    """Return the name and the id of each process of the Ray node."""
    found = []
    for pid in head.processes:
        with contextlib.suppress(psutil.Error, IndexError):  # the process may have just ended
            found.append((Path(psutil.Process(pid).cmdline()[0]).name, pid))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [pytest.param("gcs_server", marks=pytest.mark.soak), "raylet"])
def test_ray_node_runs_expected_processes_and_ends_with_each(tmp_path: Path, ended: str) -> None:
    """The node also ends if one of its processes ends normally; Ray itself would wait for that process."""
    with RayHead(tmp_path, cpus=1) as head:
        wanted = ["gcs_server", "python", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "raylet"]
        until(lambda: [name for name, _ in named(head)] == wanted)
        here = [one.laddr.ip for pid in head.processes for one in psutil.Process(pid).net_connections("inet")]
        assert [ip for ip in here if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback] == []
        assert here
        os.kill(dict(named(head))[ended], signal.SIGTERM)
        until(lambda: not head.running)
