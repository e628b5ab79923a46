"""Compares the resources that a run's Ray actors require with the resources of the cluster's nodes. If a new node could
provide a missing resource, a note says so. If no node can provide the resource, an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.placement import Role, engine_cpus, is_fitting, learner_cpus
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.reward_models import model_cpus


def check_private_placement(config: RunConfig) -> None:
    """Reject custom labels and custom resources for a private Ray cluster. The only node of a private cluster has no
    custom labels or resources, so an actor that requires a custom label would never start.

    Raises:
        ConfigError: the configuration requires a custom label or resource for a role such as the learner.
    """
    if config.cluster.address != "auto":
        return
    for role in get_args(Role):
        own = getattr(config.cluster.placement, role)
        labels = {name: value for name, value in own.labels.items() if not name.startswith("ray.io/")}
        # A name with a colon is one of Ray's own resources.
        resource = own.resource if own.resource and ":" not in own.resource else None
        for key, value in (("labels", labels), ("resource", resource)):
            if value:
                cure = "set cluster.address to a cluster with such a node, or remove the key"
                where = f"cluster.placement.{role}.{key} = {value!r}"
                raise ConfigError(
                    f"{where}: no node has this, because the single node of a private cluster has neither labels "
                    f"nor custom resources; {cure}"
                )


def note_placement(config: RunConfig, nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each resource that actors require and that no living node of the cluster has."""
    placement = config.cluster.placement
    for role in get_args(Role):
        own = getattr(placement, role)
        wanted = ", ".join([*(f"{key}={value}" for key, value in own.labels.items()), *filter(None, [own.resource])])
        if wanted and not any(is_fitting(node, config, role) for node in nodes):
            yield (
                f"cluster.placement.{role}: none of the {len(nodes)} nodes has {wanted}; the actors of this role "
                "wait for such a node: start one with `ray start --labels` or `--resources`"
            )
    have, need = sum(float(node["Resources"].get("CPU", 0.0)) for node in nodes), needed_cpus(config)
    if placement.reserve_cpus and need > have:
        yield (
            f"cluster.placement.reserve_cpus = true: the run's actors need {need:g} CPUs, and the cluster "
            f"has {have:g}, so some actors wait for more nodes; add nodes, set reserve_cpus = false, or "
            "lower engine.replicas or reward.workers"
        )


def needed_cpus(config: RunConfig) -> float:
    """Return the number of CPUs that all Ray actors of a run reserve if `cluster.placement.reserve_cpus` is true."""
    ranks = config.train.threads * (config.train.ranks - 1) if config.train.multi_node else 0
    own = config.evaluation_engine(on_cpu=True)
    engines = config.engine.replicas * engine_cpus(config.engine) + (engine_cpus(own) if own else 0.0)
    rewards = config.scorer_workers * config.cluster.reward_actors.min
    return engines + learner_cpus(config) + ranks + 1.0 + rewards + model_cpus(config)
