"""Placement of a run's actors on a Ray cluster: their nodes, the resources they reserve, and their environment.

- Without `cluster.placement` an actor reserves its GPUs and almost no CPU. The actor therefore runs on a node with a
  CPU, and never on a host that joined the cluster without CPUs, such as the supervisor's host.
- With `reserve_cpus` an actor reserves the CPUs that the actor's threads use, so no other actor gets these CPUs.
- A role with labels or a custom resource runs only on nodes with these labels or this resource.
- Engines are placed on the nodes in turn ("spread", so that the loss of a node loses few engines), or packed by Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollflow.tasks.actors.early_imports import Kind, worker_environment
from rollflow.tasks.engines.config import EngineConfig, TimedEngineConfig
from rollflow.tasks.run.config import RunConfig

Role = Literal["engine", "learner", "scheduler", "reward"]
LEAST = 0.001  # amount of a resource; Ray would place an actor that asks for no resource on a random node


def actor_options(
    config: RunConfig, role: Role, cpus: float, *, gpus: float = 0.0, imports: Kind | None = None
) -> dict[str, Any]:
    """Return Ray's options for an actor.

    Args:
        cpus: number of CPUs that the actor's threads use.
        gpus: number of GPUs that the actor reserves.
        imports: the kind of worker to start in, on a private cluster.
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
    """Return the Ray option with the environment of an actor's process; empty if Ray's default environment suffices.

    Workers with early imports exist only on a private cluster and only for the default environment.
    """
    cluster = config.cluster
    if cluster.runtime_env or cluster.env:
        env = {"env_vars": dict(cluster.env)} if cluster.env else {}
        return {"runtime_env": {**cluster.runtime_env, **env}}
    if imports is None or gpus or cluster.address != "auto":
        return {}
    return {"runtime_env": worker_environment(imports)}


def engine_cpus(engine: EngineConfig) -> float:
    """Return the CPUs that an engine's threads use."""
    return LEAST if isinstance(engine, TimedEngineConfig) else float(engine.threads)


def learner_cpus(config: RunConfig) -> float:
    """Return the CPUs of the learner's actor, including the CPUs of ranks that are child processes of the actor."""
    return float(config.train.threads * (1 if config.train.multi_node else config.train.ranks))


def is_fitting(node: Mapping[str, Any], config: RunConfig, role: Role) -> bool:
    """Return whether a node from Ray's list may run an actor of the role."""
    own = getattr(config.cluster.placement, role)
    labels, resources = node.get("Labels", {}), node.get("Resources", {})
    return all(labels.get(key) == value for key, value in own.labels.items()) and (
        not own.resource or own.resource in resources
    )
