"""Runs a node of a private Ray cluster: either the head (GCS and raylet), or an additional node (a raylet) that joins
the head.

The Ray node runs Ray's agents, but no dashboard, autoscaler, log monitor or client server. The process exits as soon as
one of its child processes exits.

This module uses Ray's private class `Node`, because the public command `ray start --block` has three faults (Ray 2.60).

* `ray start` always starts the dashboard's process and a Ray client server. The two processes double the CPU seconds of
  a start, and need 180 MiB of memory and two open ports.
* `ray start` keeps waiting if one of the node's processes ended with exit code 0 or by SIGTERM.
* `ray start` cannot join a node to a head that listens on loopback only, because it replaces 127.0.0.1 by the machine's
  outside address. The environment variable `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0` keeps 127.0.0.1, but then no node can
  join the head.

`tests/contracts/test_ray_private.py` tests the private parts of Ray that this package uses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rollflow.flows.ray_cluster.lost_workers import WorkerWatch
from rollflow.flows.ray_cluster.prewarmed_workers import PrewarmedWorkers
from rollflow.flows.services.process import free_port

WATCH_SECONDS = 0.2
WORKER = Path(__file__).with_name("ray_worker.py")


def serve(given: argparse.Namespace) -> str:
    """Start the Ray node's processes, and write the file `ready`; return a description of the first process that
    dies.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Bare(Node):  # type: ignore[misc]
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Start no API server of Ray, because its process costs one CPU second even without the dashboard."""

    parameters = RayParams(
        node_ip_address=given.ip,
        num_cpus=given.cpus,
        num_gpus=given.gpus,
        resources=json.loads(given.resources),
        labels=json.loads(given.labels),
        object_store_memory=given.object_store_bytes,
        temp_dir=given.temp,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        worker_path=str(WORKER),
        # any free port, because Ray's default (52365) is the same for all clusters of a machine
        dashboard_agent_listen_port=free_port(),
        **({"gcs_address": given.join} if given.join else {"gcs_server_port": given.port}),
    )
    # Linux needs no reaper process of Ray: the kernel ends the node's processes with this process.
    node = Bare(parameters, head=not given.join, shutdown_at_exit=False, spawn_reaper=sys.platform == "linux")
    given.ready.write_text(node.gcs_address)
    spares = _build_spares(node, given) if given.spares else None
    watch = WorkerWatch(_raylet_pid(node), given.lost) if given.lost else None
    while node.remaining_processes_alive():
        if watch:
            watch.look()
        if spares:
            spares.look()
        time.sleep(WATCH_SECONDS)
    return ", ".join(f"{kind} (exit code {process.returncode})" for kind, process in node.dead_processes())


def _build_spares(node: Any, given: argparse.Namespace) -> PrewarmedWorkers:
    """Return the object that keeps spare Ray workers on this node."""
    address = f"{node.node_ip_address}:{node.node_manager_port}"
    return PrewarmedWorkers(address, _raylet_pid(node), given.spares, given.kinds.split(","), kept=given.keep_spares)


def _raylet_pid(node: Any) -> int:
    """Return the process id of the Ray node's raylet."""
    from ray._private import ray_constants

    return int(node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description="a node of a private Ray cluster")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="port at which a new Ray head listens")
    where.add_argument("--join", help="address of the Ray head that the node joins")
    parser.add_argument(
        "--ip",
        default="127.0.0.1",
        help="address of the node; by default nothing outside of this machine can reach the node",
    )
    parser.add_argument("--temp", required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--resources", default="{}")
    parser.add_argument("--labels", default="{}")
    parser.add_argument("--object-store-bytes", type=int, required=True)
    parser.add_argument(
        "--spares", type=Path, help="folder for requests to spare workers; without a folder there are no spare workers"
    )
    parser.add_argument("--kinds", help="kinds of the spare workers, separated by commas")
    parser.add_argument("--keep-spares", action="store_true", help="start another spare worker as soon as one is used")
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--lost", type=Path, help="folder with records of the workers that died while they started")
    raise SystemExit(f"a process of the Ray node ended: {serve(parser.parse_args())}")


if __name__ == "__main__":
    main()
