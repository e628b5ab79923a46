"""Places a run's actors on a Ray cluster: chooses their nodes, reserved resources and environment.

- By default, an actor reserves its GPUs and almost no CPU. Reserving a little CPU keeps actors off hosts that joined
  the cluster without CPUs, such as the supervisor's host.
- With `reserve_cpus`, an actor reserves all CPUs that its threads use.
- An actor whose role has labels or a custom resource runs only on nodes that have them.
- With the strategy "spread", engines are distributed over the nodes, so that the loss of a node costs few engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollflow.tasks.actors.early_imports import Kind, worker_environment
from rollflow.tasks.engines.config import EngineConfig, TimedEngineConfig
from rollflow.tasks.run.config import RunConfig

Role = Literal["engine", "learner", "scheduler", "reward", "environment"]
LEAST = 0.001  # amount of a Ray resource to reserve for an actor that needs almost none of it


def actor_options(
    config: RunConfig, role: Role, cpus: float, *, gpus: float = 0.0, imports: Kind | None = None
) -> dict[str, Any]:
    """Return the options with which Ray starts an actor of the run.

    Args:
        cpus: the actor's threads use this number of CPUs.
        gpus: the actor reserves this number of GPUs.
        imports: on a private cluster, the actor starts in a worker process that has imported the modules of this kind.
    """
    placement = config.cluster.placement
    own = getattr(placement, role)
    options: dict[str, Any] = {"num_cpus": cpus if placement.reserve_cpus and cpus else LEAST, "num_gpus": gpus}
    if own.labels:
        options["label_selector"] = dict(own.labels)
    if own.resource:
        options["resources"] = {own.resource: LEAST}
    if role == "engine" and placement.strategy == "spread":
        options["scheduling_strategy"] = "SPREAD"
    return options | runtime_env(config, gpus, imports)


def runtime_env(config: RunConfig, gpus: float = 0.0, imports: Kind | None = None) -> dict[str, Any]:
    """Return Ray's `runtime_env` option for an actor's process, or {} for Ray's default environment.

    Worker processes with early imports exist only on a private cluster with the default environment.
    """
    cluster = config.cluster
    if cluster.runtime_env or cluster.env:
        env = {"env_vars": dict(cluster.env)} if cluster.env else {}
        return {"runtime_env": {**cluster.runtime_env, **env}}
    if imports is None or gpus or cluster.address != "auto":
        return {}
    return {"runtime_env": worker_environment(imports)}


def engine_cpus(engine: EngineConfig) -> float:
    """Return the number of CPUs that an inference engine's threads use."""
    return LEAST if isinstance(engine, TimedEngineConfig) else float(engine.threads)


def learner_cpus(config: RunConfig) -> float:
    """Return the number of CPUs of the learner's actor, including those of ranks that are its child processes."""
    return float(config.train.threads * (1 if config.train.multi_node else config.train.ranks))


def is_fitting(node: Mapping[str, Any], config: RunConfig, role: Role) -> bool:
    """Return whether a node of the Ray cluster has the labels and the resource that a role requires."""
    own = getattr(config.cluster.placement, role)
    labels, resources = node.get("Labels", {}), node.get("Resources", {})
    return all(labels.get(key) == value for key, value in own.labels.items()) and (
        not own.resource or own.resource in resources
    )
