"""Starts the environment actors of the rollout actor on the nodes with the fewest of them, calls them and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from rollflow.tasks.actors.environment_hosts.actor import start_host
from rollflow.tasks.actors.placement import is_fitting
from rollflow.tasks.environments.spread.fleet import HostFleet, HostLink, HostLost
from rollflow.tasks.environments.use_counts import UsedEnvironments
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.cpu import name_own_process
from rollflow.tasks.scorers.spread.follower import QueueFollower

START_SECONDS = 600.0  # longest time, in seconds, until an actor has started, including the wait for a node
CLOSE_SECONDS = 15.0  # longest time, in seconds, in which an actor may end its worker processes


def choose_host_node(
    nodes: Sequence[Mapping[str, Any]], config: RunConfig, used: Mapping[str, int], home: str = ""
) -> str | None:
    """Return the id of the living node with the fewest environment actors, of those that may run the next one. The
    result is None if Ray should choose the node.

    Args:
        nodes: the nodes of the cluster, as `ray.nodes` describes them.
        used: number of environment actors, and of those that were lost, on each node.
        home: the node of the scheduler, which is chosen only if no other node has as few environment actors.
    """
    if config.cluster.placement.strategy != "spread":
        return None
    fitting = [
        str(node["NodeID"])
        for node in nodes
        if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0 and is_fitting(node, config, "environment")
    ]
    return min(fitting, key=lambda node: (used.get(node, 0), node == home, node), default=None)


class RayHost(HostLink):
    """The connection to an environment actor."""

    def __init__(self, context: RunContext, used: Counter[str], home: str) -> None:
        """Create the connection without an actor. `used` is the number of environment actors on each node, and `home`
        the node of the scheduler."""
        self._context, self._used, self._home = context, used, home
        self._actor: Any = None
        self._node = ""

    async def start(self) -> None:
        """Start the Ray actor; raise `HostLost` if it cannot start."""
        with _lost_hosts():
            nodes = await asyncio.to_thread(ray.nodes)
            chosen = choose_host_node(nodes, self._context.config, self._used, self._home)
            self._use_node(chosen or "")
            self._actor = await asyncio.to_thread(start_host, self._context, chosen)
            async with asyncio.timeout(START_SECONDS):
                self._use_node(await self._actor.find_node.remote())

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the actor; raise `HostLost` if the actor is gone."""
        with _lost_hosts():
            return await getattr(self._actor, method).remote(*given)

    async def end(self) -> None:
        """End the Ray actor and its worker processes."""
        if self._actor is None:
            return
        try:
            with contextlib.suppress(HostLost), _lost_hosts():
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._actor.close.remote()
                self._use_node("")
        finally:
            ray.kill(self._actor)

    def _use_node(self, node: str) -> None:
        """Count the actor on the node where it runs, instead of the node that was chosen. The node of a lost actor
        still counts, so that the next actor starts elsewhere if possible.
        """
        self._used[self._node] -= 1
        self._used[node] += 1
        self._node = node


@contextlib.contextmanager
def _lost_hosts() -> Iterator[None]:
    """Raise `HostLost` in place of the errors of an actor that has died, failed or does not answer."""
    try:
        yield
    except TimeoutError:
        raise HostLost("it does not answer") from None
    except ray.exceptions.RayError as error:
        raise HostLost((str(error).strip() or type(error).__name__).splitlines()[0]) from None


def open_environments(context: RunContext, config: RunConfig) -> UsedEnvironments:
    """Return the environments of the rollout actor; with `cluster.environment_actors`, their worker processes run in
    environment actors."""
    bounds = config.cluster.environment_actors
    if not bounds.most:
        return UsedEnvironments(name_own_process())
    follower = QueueFollower(bounds.min, bounds.most, bounds.grow_seconds, bounds.idle_seconds)
    used, home = Counter[str](), str(ray.get_runtime_context().get_node_id())
    fleet = HostFleet(
        lambda: RayHost(context, used, home),
        follower,
        bounds.most,
        config.recovery.answer_seconds,
        logging.getLogger(__name__).warning,
    )
    return UsedEnvironments(name_own_process(), fleet)
