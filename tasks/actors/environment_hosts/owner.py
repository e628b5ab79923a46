"""Starts, calls and ends the rollout actor's environment actors; each starts on the node with the fewest of them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import ray

from rollflow.tasks.actors.environment_hosts.actor import start_host
from rollflow.tasks.actors.placement import LEAST
from rollflow.tasks.actors.spread.member import FleetActor, NodeChoice, report_lost_actors
from rollflow.tasks.environments.spread.fleet import HostFleet, HostLink
from rollflow.tasks.environments.use_counts import UsedEnvironments
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.cpu import name_own_process
from rollflow.tasks.scorers.spread.follower import QueueFollower

# The node of the scheduler is chosen only if each other node has an environment actor.
SCHEDULER_WEIGHT = 0.5


class RayHost(FleetActor, HostLink):
    """The connection to an environment actor."""

    def __init__(self, context: RunContext, nodes: NodeChoice) -> None:
        """Create the connection without an actor."""
        super().__init__(nodes)
        self._context = context

    async def start(self) -> None:
        """Start the Ray actor; raise `PlaceLost` if it cannot start."""
        await self._start_actor(partial(start_host, self._context), lambda actor: actor.find_node.remote())

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the actor; raise `PlaceLost` if the actor is gone."""
        with report_lost_actors():
            return await getattr(self._actor, method).remote(*given)


def open_environments(context: RunContext, config: RunConfig) -> UsedEnvironments:
    """Return the environments of the rollout actor; with `cluster.environment_actors`, their worker processes run in
    environment actors."""
    bounds = config.cluster.environment_actors
    if not bounds.most:
        return UsedEnvironments(name_own_process())
    home = str(ray.get_runtime_context().get_node_id())
    nodes = NodeChoice(config, "environment", LEAST, {home: SCHEDULER_WEIGHT})
    fleet = HostFleet(
        lambda: RayHost(context, nodes),
        QueueFollower(bounds.min, bounds.most, bounds.grow_seconds, bounds.idle_seconds),
        bounds.most,
        config.recovery.answer_seconds,
        logging.getLogger(__name__).warning,
    )
    return UsedEnvironments(name_own_process(), fleet)
