"""Starts the engines of a run under several placements, and prints the nodes on which they run.

`python -m tests.support.placed ADDRESS FOLDER`: the cluster has one node with the resource "rollout", and this node has
the label of `LABELS`. The last line of the output is JSON: it contains this node, and for each placement the nodes of
its engines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.actors.run_engines import start_engine
from rollflow.tasks.run.context import RunContext
from tests.support.small_run import prepare_small

ENGINES = 2
LABELS = {"ray.io/accelerator-type": "H100"}
CASES: dict[str, Mapping[str, Any]] = {
    "labels": {"engine": {"labels": LABELS}},
    "resource": {"engine": {"resource": "rollout"}},
    "pack": {"strategy": "pack"},
    "spread": {},
}


def nodes_of_engines(context: RunContext) -> list[str]:
    """Return the nodes of a run's engines."""
    actors = [start_engine(context, number, 0.0) for number in range(ENGINES)]
    ray.get([actor.health.remote() for actor in actors], timeout=300)
    states = [ray._private.state.actors(actor._actor_id.hex()) for actor in actors]
    cluster.kill_named([f"engine-{number}" for number in range(ENGINES)])
    return sorted({state["Address"]["NodeID"] for state in states})


def main() -> None:
    address, folder = sys.argv[1], Path(sys.argv[2])
    shared = {"address": address}
    runs = {  # the runs are prepared first, because their checks attach to the cluster themselves
        name: prepare_small(
            folder, name, cluster=shared | {"placement": placement, "env": {"PLACED": name}}, engine={"kind": "timed"}
        )
        for name, placement in CASES.items()
    }
    cluster.attach(address, "placed", deadline_seconds=60)
    there = next(node["NodeID"] for node in ray.nodes() if "rollout" in node["Resources"])
    print(json.dumps([there, {name: nodes_of_engines(run) for name, run in runs.items()}]))


if __name__ == "__main__":
    main()
