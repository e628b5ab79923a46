"""Looks up the process of a Ray actor: whether the actor is created, its process id and its CPU time. The functions
never call the actor itself, so they do not block if the actor hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from rollflow.flows.ray_cluster.lost_workers import explain_lost_worker, list_deaths
from rollflow.tasks.actors.early_imports import Kind

CALL_SECONDS = 20.0
KINDS: dict[str, Kind] = {  # class name of a Ray actor -> the kind of Ray worker in which the actor starts
    "EngineActor": "engine",
    "LearnerActor": "learner",
    "RolloutActor": "rollout",
    "RewardActor": "reward",
}


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """The node and the process of a Ray actor. `state` is the actor's state as Ray names it ("PENDING_CREATION",
    "ALIVE", "DEAD"); `pid` is 0 if the actor has no process.
    """

    state: str
    pid: int
    node: str
    class_name: str

    @property
    def created(self) -> bool:
        """True if the Ray actor is created and can be called."""
        return self.state == "ALIVE" and self.pid > 0

    @property
    def pending(self) -> bool:
        """True while the Ray actor is not yet created."""
        return self.state in ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of the Ray actor's process; return None if the process is gone or the actor's node
        does not answer.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.node == ray.get_runtime_context().get_node_id():
            return cpu_seconds(self.pid)
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        ask = ray.remote(num_cpus=0, max_retries=0)(cpu_seconds).options(scheduling_strategy=there)
        try:
            used: float | None = ray.get(ask.remote(self.pid), timeout=CALL_SECONDS)
        except ray.exceptions.RayError:
            return None
        return used


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds of a process on this node, plus the seconds that it waited for disks if the system reports
    them.
    """
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system + getattr(times, "iowait", 0.0))
    except psutil.Error:
        return None


def find_actor_process(actor_id: Any) -> ActorProcess | None:
    """Return the process of the Ray actor with this id (Ray's `ActorID`); return None if Ray does not know the
    actor.
    """
    from ray._private import state

    if actor_id is None or actor_id.is_nil():
        return None
    found = state.actors(actor_id.hex())
    if not found:
        return None
    return ActorProcess(found["State"], int(found["Pid"]), found["Address"]["NodeID"], found["ActorClassName"])


def explain_lost_call(reference: Any) -> str:
    """Return the reason why the Ray actor of a call cannot be created; return "" if the reason is unknown or was
    returned before.
    """
    return explain_lost_actor(reference.task_id().actor_id()) if list_deaths() else ""


def explain_lost_actor(actor_id: Any) -> str:
    """Return the reason why a Ray actor cannot be created; return "" if it is unknown or was returned before."""
    if not list_deaths():
        return ""
    found = find_actor_process(actor_id)
    return explain_lost_worker(KINDS.get(found.class_name, "")) if found and found.pending else ""
