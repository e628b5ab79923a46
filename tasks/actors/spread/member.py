"""Starts, calls and ends a Ray actor of a fleet, on the allowed node with the fewest actors of the fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray

from rollflow.tasks.actors.placement import Role, actor_options, is_fitting
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.scorers.spread.members import PlaceLost

START_SECONDS = 600.0  # longest time, in seconds, until an actor has started, including the wait for a node
Answer = TypeVar("Answer")


class NodeChoice:
    """Chooses the node of each actor of a fleet, and counts the actors on each node."""

    def __init__(self, config: RunConfig, role: Role, threads: float, used: Mapping[str, float]) -> None:
        """Begin with no actor of the fleet. `threads` is the number of CPUs that an actor uses. `used` has, by node,
        the number of other actors of the run, which count like actors of the fleet.
        """
        self._config, self._role, self.used = config, role, dict(used)
        self._cpus = actor_options(config, role, threads)["num_cpus"]

    def choose(self, nodes: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the id of the living node that may run the next actor and has the fewest actors, or None if Ray should
        choose the node. `nodes` are the nodes of the cluster, as `ray.nodes` describes them.
        """
        if self._config.cluster.placement.strategy != "spread":
            return None
        fitting = [
            str(node["NodeID"])
            for node in nodes
            if node["Alive"]
            and node["Resources"].get("CPU", 0.0) >= self._cpus
            and is_fitting(node, self._config, self._role)
        ]
        return min(fitting, key=lambda node: (self.used.get(node, 0), node), default=None)

    def note_move(self, before: str, after: str) -> None:
        """Count an actor on the node `after` instead of the node `before`."""
        self.used[before] = self.used.get(before, 0) - 1
        self.used[after] = self.used.get(after, 0) + 1


class FleetActor:
    """A Ray actor of a fleet, i.e. of a group of actors that share the same kind of work."""

    close_seconds = 15.0  # longest time, in seconds, in which the actor may end its worker processes

    def __init__(self, nodes: NodeChoice) -> None:
        """Create the object without an actor."""
        self._nodes = nodes
        self._actor: Any = None
        self._node = ""

    async def _start_actor(self, start: Callable[[str | None], Any], begin: Callable[[Any], Awaitable[str]]) -> None:
        """Call `start` with the chosen node to start the actor; call `begin` with the actor to get the node on which it
        runs.

        Raises:
            PlaceLost: the actor cannot start.
        """
        with report_lost_actors():
            chosen = self._nodes.choose(await asyncio.to_thread(ray.nodes))
            self._use_node(chosen or "")
            self._actor = await asyncio.to_thread(start, chosen)
            try:
                async with asyncio.timeout(START_SECONDS):
                    self._use_node(await begin(self._actor))
            except TimeoutError:
                raise PlaceLost(f"the actor did not start within {START_SECONDS:g} s") from None

    async def _call(self, call: Awaitable[Answer], seconds: float) -> Answer:
        """Return the result of a call; raise `PlaceLost` if the actor is gone or does not answer in these seconds."""
        with report_lost_actors():
            async with asyncio.timeout(seconds):
                return await call

    async def end(self) -> None:
        """End the Ray actor and its worker processes."""
        if self._actor is None:
            return
        try:
            with contextlib.suppress(PlaceLost):
                await self._call(self._actor.close.remote(), self.close_seconds)
                self._use_node("")
        finally:
            ray.kill(self._actor)

    def _use_node(self, node: str) -> None:
        """Count the actor on `node` instead of the node on which it was counted before. A lost actor still counts on
        its node, so that the next actor starts elsewhere if possible.
        """
        self._nodes.note_move(self._node, node)
        self._node = node


@contextlib.contextmanager
def report_lost_actors() -> Iterator[None]:
    """Raise `PlaceLost` in place of the errors of an actor that has died, failed or does not answer."""
    try:
        yield
    except TimeoutError:
        raise PlaceLost("the actor does not answer") from None
    except ray.exceptions.RayTaskError as error:
        raise PlaceLost(f"a call of the actor failed with {error.cause!r}") from None
    except ray.exceptions.RayError as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        failed = isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed
        raise PlaceLost(f"the start of the actor failed with {lines[-1]}" if failed else lines[0]) from None
