"""Ranks of a learner that are actors of Ray's (`train.spread`): wherever there is room, each with a GPU of its own.

    learner's actor (first rank) --starts--> RankActor (rank 1), RankActor (rank 2), ...
            +---- orders, over a connection of its own that asks for a secret ----+

They belong to the learner's actor: Ray ends them with it. Their GPUs are taken together, in a placement group, or not
at all: two runs never wait for each other with half of their ranks. What ranks say to each other goes over the network
between their machines, not encrypted.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rollflow.storage.errors import Unreachable
from rollflow.tasks.actors.placement import actor_options, fits, runtime_env
from rollflow.tasks.learners.rank_orders import Meeting, Pipes, RankHosts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import start_of

RESERVED_SECONDS = 240.0  # for GPUs to be free; ranks are waited for a little longer
CONNECTED_SECONDS = 60.0  # for a rank that is there to have its connections taken
GONE = "ended: its process or its machine is gone"


Room = Callable[[int], dict[str, Any]]  # Ray's options for a rank


def rank_hosts(context: RunContext) -> RankHosts:
    """For the learner of this process, which is an actor.

    Raises:
        Unreachable: GPUs for the other ranks were not free at the same time.
    """
    config = context.config
    room = reserved(config, config.train.ranks - 1) if ray.get_gpu_ids() else partial(in_turn, config)
    return RankHosts(node_address(), partial(SpreadRank, context, room))


def node_address() -> str:
    """Of this process's node, as the other nodes know it."""
    return str(nodes()[0]["NodeManagerAddress"])


def nodes() -> list[dict[str, Any]]:
    """Ray's living nodes, this one first."""
    own = ray.get_runtime_context().get_node_id()
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != own)


def reserved(config: RunConfig, ranks: int, seconds: float = RESERVED_SECONDS, name: str = "ranks") -> Room:
    """A GPU for each of the other ranks, near each other where that can be.

    They are the run's until its job on the cluster ends. Ray keeps them where only a learner ends, so the next one
    gives back what that one had: `name`, in the run's namespace.
    """
    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(get_placement_group(name))
    own = actor_options(config, "learner", float(config.train.threads))
    bundle = {"GPU": 1, "CPU": own["num_cpus"], **own.get("resources", {})}
    labels = [own["label_selector"]] * ranks if "label_selector" in own else None
    group = placement_group([bundle] * ranks, strategy="PACK", name=name, bundle_label_selector=labels)
    if not group.wait(seconds):
        remove_placement_group(group)
        cure = "another run may have them; wait for it, or set train.ranks to less"
        raise Unreachable(f"train.ranks = {ranks + 1}: {ranks} GPUs were not free together for {seconds:g} s; {cure}")
    return lambda rank: {
        "num_gpus": 1,
        "num_cpus": own["num_cpus"],  # else Ray asks for one at the start, which the group does not have
        **runtime_env(config, gpus=1),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank - 1),
    }


def in_turn(config: RunConfig, rank: int) -> dict[str, Any]:
    """Without GPUs the nodes have ranks in turn."""
    every = [node for node in nodes() if fits(node, config, "learner")] or nodes()
    near = NodeAffinitySchedulingStrategy(every[rank % len(every)]["NodeID"], soft=True)
    own = actor_options(config, "learner", float(config.train.threads))
    own.pop("label_selector", None)  # the node has them
    return {**own, "scheduling_strategy": near}


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a rank calls for its orders."""

    address: Any
    secret: bytes = field(repr=False)


class SpreadRank:
    """A rank in an actor; see `StartedRank`."""

    def __init__(self, context: RunContext, room: Room, rank: int, meeting: Meeting) -> None:
        secret = secrets.token_bytes(32)
        self._listener = Listener((meeting.host, 0), authkey=secret)
        self._pipes: Future[Pipes] = Future()
        Thread(target=self._accept, daemon=True).start()
        self._actor = ray.remote(RankActor).options(**room(rank)).remote(context)
        self._served = self._actor.serve.remote(rank, meeting, Caller(self._listener.address, secret))

    @property
    def pipes(self) -> Pipes:
        """See `StartedRank`."""
        return self._pipes.result(CONNECTED_SECONDS)

    def ended(self) -> str | None:
        """See `StartedRank`."""
        return GONE if ray.wait([self._served], timeout=0)[0] else None

    def end(self) -> None:
        """See `StartedRank`. Where Ray is gone or knows it no more, it has ended."""
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):
                ray.kill(self._actor)
        self._listener.close()
        if self._pipes.done():
            self._pipes.result().close()

    def _accept(self) -> None:
        """The rank's two connections, in their order; whoever else calls is not let in."""
        found = list[Connection]()
        while len(found) < 2:
            try:
                found.append(self._listener.accept())
            except (AuthenticationError, EOFError, ConnectionError):
                pass  # somebody else
            except OSError:
                return  # it was closed
        self._pipes.set_result(Pipes(*found))


class RankActor:
    """A rank that is not the first."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def serve(self, rank: int, meeting: Meeting, caller: Caller) -> None:
        """Until the learner's actor ends, or another rank does."""
        from rollflow.tasks.learners.rank_process import serve_rank

        pipes = Pipes(*(Client(caller.address, authkey=caller.secret) for _ in range(2)))
        serve_rank(rank, meeting, node_address(), pipes, self._context.config.train, start_of(self._context))
