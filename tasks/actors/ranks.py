"""Runs the ranks of a distributed learner as Ray actors (`train.multi_node`), each with a GPU on any node.

    learner's actor (first rank) --starts--> RankActor (rank 1), RankActor (rank 2), ...
            +---- orders, over a separate connection that is protected by a secret ----+

Rank actors end together with the learner's actor. GPUs of the ranks are reserved together in a placement group, so that
two runs do not reserve half of the GPUs each and wait for each other. Traffic between ranks is sent over the network
unencrypted.
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
from rollflow.tasks.actors.placement import actor_options, is_fitting, runtime_env
from rollflow.tasks.learners.distributed.rank_protocol import Meeting, Pipes, RankHosts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import start_of

RESERVED_SECONDS = 240.0  # longest time, in seconds, to wait for free GPUs
CONNECTED_SECONDS = 60.0  # longest time, in seconds, to wait until a started rank has connected
GONE = "ended, because its process or its machine is gone"


Room = Callable[[int], dict[str, Any]]  # Ray's options for a rank


def rank_hosts(context: RunContext) -> RankHosts:
    """Return the `RankHosts` object with which the learner's actor (rank 0) starts all other ranks.

    Raises: Unreachable: the cluster did not have enough free GPUs for all ranks in time.
    """
    config = context.config
    room = reserve_gpus(config, config.train.ranks - 1) if ray.get_gpu_ids() else partial(place_in_turn, config)
    return RankHosts(find_node_address(), partial(SpreadRank, context, room))


def find_node_address() -> str:
    """Return the network address under which other nodes reach this process's node."""
    return str(list_nodes()[0]["NodeManagerAddress"])


def list_nodes() -> list[dict[str, Any]]:
    """List the living nodes of the Ray cluster, starting with this process's node."""
    own = ray.get_runtime_context().get_node_id()
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != own)


def reserve_gpus(config: RunConfig, ranks: int, seconds: float = RESERVED_SECONDS, name: str = "ranks") -> Room:
    """Reserve a GPU for each learner rank except rank 0, on as few nodes as possible.

    The GPUs stay reserved until the run's job on the Ray cluster ends. A restarted learner first removes the placement
    group of the dead learner by its `name`.
    """
    with contextlib.suppress(ValueError):  # no such placement group exists
        remove_placement_group(get_placement_group(name))
    own = actor_options(config, "learner", float(config.train.threads))
    bundle = {"GPU": 1, "CPU": own["num_cpus"], **own.get("resources", {})}
    labels = [own["label_selector"]] * ranks if "label_selector" in own else None
    group = placement_group([bundle] * ranks, strategy="PACK", name=name, bundle_label_selector=labels)
    if not group.wait(seconds):
        remove_placement_group(group)
        cure = "wait for another run that may use GPUs, or set train.ranks to a smaller number"
        raise Unreachable(
            f"train.ranks = {ranks + 1}: {ranks} GPUs were not free at the same time within {seconds:g} s; {cure}"
        )
    return lambda rank: {
        "num_gpus": 1,
        "num_cpus": own["num_cpus"],  # by default Ray would require a CPU, which the placement group lacks
        **runtime_env(config, gpus=1),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank - 1),
    }


def place_in_turn(config: RunConfig, rank: int) -> dict[str, Any]:
    """Return Ray's options for a learner rank without a GPU; the ranks are placed on the nodes in rotation."""
    every = [node for node in list_nodes() if is_fitting(node, config, "learner")] or list_nodes()
    near = NodeAffinitySchedulingStrategy(every[rank % len(every)]["NodeID"], soft=True)
    own = actor_options(config, "learner", float(config.train.threads))
    own.pop("label_selector", None)  # the chosen node has the labels
    return {**own, "scheduling_strategy": near}


@dataclass(frozen=True, slots=True)
class Caller:
    """The address and the secret with which a learner rank connects to the learner's actor."""

    address: Any
    secret: bytes = field(repr=False)


class SpreadRank:
    """Handle of a learner rank that runs in its own Ray actor; implements `StartedRank`."""

    def __init__(self, context: RunContext, room: Room, rank: int, meeting: Meeting) -> None:
        secret = secrets.token_bytes(32)
        self._listener = Listener((meeting.host, 0), authkey=secret)
        self._pipes: Future[Pipes] = Future()
        Thread(target=self._accept, daemon=True).start()
        self._actor = ray.remote(RankActor).options(**room(rank)).remote(context)
        self._served = self._actor.serve.remote(rank, meeting, Caller(self._listener.address, secret))

    @property
    def pipes(self) -> Pipes:
        """The connections to the learner rank, after a wait until the rank has connected."""
        return self._pipes.result(CONNECTED_SECONDS)

    def read_exit(self) -> str | None:
        """Return the reason why the learner rank ended, or None while the rank runs."""
        return GONE if ray.wait([self._served], timeout=0)[0] else None

    def end(self) -> None:
        """End the learner rank, if it still runs, and close its connections."""
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):
                ray.kill(self._actor)
        self._listener.close()
        if self._pipes.done():
            self._pipes.result().close()

    def _accept(self) -> None:
        """Accept the two connections of a learner rank, and reject connections from other processes."""
        found = list[Connection]()
        while len(found) < 2:
            try:
                found.append(self._listener.accept())
            except (AuthenticationError, EOFError, ConnectionError):
                pass  # the process that connected is not the rank
            except OSError:
                return  # the listener was closed
        self._pipes.set_result(Pipes(*found))


class RankActor:
    """Ray actor of one learner rank; rank 0 has none, because it runs in the learner's actor."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def serve(self, rank: int, meeting: Meeting, caller: Caller) -> None:
        """Run the learner rank until the learner's actor or any other rank ends."""
        from rollflow.tasks.learners.multi_rank.rank_process import serve_rank

        pipes = Pipes(*(Client(caller.address, authkey=caller.secret) for _ in range(2)))
        serve_rank(rank, meeting, find_node_address(), pipes, self._context.config.train, start_of(self._context))
