"""Defines the Ray actor that runs the worker processes of environments on one node.

Ray ends the actor when the rollout actor ends or dies. If the process of the actor dies, the kernel ends its worker
processes.
"""

from __future__ import annotations

from typing import Any

import ray

from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import LEAST, actor_options
from rollflow.tasks.environments.spread.host import WorldHost
from rollflow.tasks.run.context import RunContext

HOST = "environment actor"
MOST_CALLS = 10_000  # largest number of calls of an actor at the same time: one for each episode, and a few more


class EnvironmentActor(WorldHost):
    """Ray actor that runs the worker processes of environments."""

    def __init__(self, lease: Lease | None = None) -> None:
        if lease:
            lease.hold(HOST)
        super().__init__()

    async def find_node(self) -> str:
        """Return the id of the Ray node on which the actor runs."""
        return str(ray.get_runtime_context().get_node_id())


def start_host(context: RunContext, node: str | None) -> Any:
    """Start an environment actor on a node, or elsewhere if the node has no room; return its handle. With `node =
    None`, Ray chooses the node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = actor_options(context.config, "environment", LEAST)
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    remote = ray.remote(EnvironmentActor).options(max_concurrency=MOST_CALLS, max_restarts=0, **options)
    return remote.remote(Lease.of(context))
