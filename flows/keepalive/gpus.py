"""How the cluster's GPUs are shared out among a run's engines and its learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollflow.flows.services import cluster
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.run.config import RunConfig


@dataclass(frozen=True, slots=True)
class GpuShares:
    """GPUs of each engine, and of the learner's actor."""

    engine: float
    learner: float


def gpu_shares(config: RunConfig) -> GpuShares:
    """Those of the cluster as it is now; see `shared_out`."""
    return shared_out(config, cluster.node_gpus())


def shared_out(config: RunConfig, nodes: Sequence[float]) -> GpuShares:
    """GPUs for each engine and the learner, of nodes that have so many.

    Each gets what it is spread over (`engine.tensor_parallel`, `train.ranks`). Where that is one for both, and there
    are too few, all get equal shares. Without GPUs nobody gets any.

    Raises:
        ConfigError: somebody is to be spread over several, and there are too few, in all or on one node.
    """
    have, largest = sum(nodes), max(nodes, default=0.0)
    if not have:
        return GpuShares(0.0, 0.0)
    engines, width, ranks = engines_of(config), width_of(config), config.train.ranks
    together = 1 if config.train.spread else ranks  # on one node
    needed = engines * width + ranks
    if width == ranks == 1:
        share = min(1.0, 1 / math.ceil(needed / have))
        return GpuShares(share, share)
    if together > largest:
        cure = "set it to that, or train.spread = true"
        raise ConfigError(f"train.ranks = {ranks}: all are on one node, and the largest has {largest:g} GPUs; {cure}")
    if width > largest:
        raise ConfigError(f"engine.tensor_parallel = {width}: the largest node has {largest:g} GPUs; set it to that")
    if needed > have:
        raise ConfigError(
            f"train.ranks = {ranks} and engine.tensor_parallel = {width}: {engines} engines and the learner take "
            f"{needed} GPUs, and the cluster has {have:g}; set engine.replicas or these to less"
        )
    return GpuShares(width, together)


def spans_gpus(config: RunConfig) -> bool:
    """Return whether an engine or the learner is to be spread over several GPUs."""
    return width_of(config) > 1 or config.train.ranks > 1


def engines_of(config: RunConfig) -> int:
    """How many there are; one for evaluations alone counts where it is like the others."""
    return config.engine.replicas + (config.evaluation_engine(on_cpu=False) == config.engine)


def width_of(config: RunConfig) -> int:
    """GPUs that one engine is spread over."""
    return config.engine.tensor_parallel if isinstance(config.engine, VllmEngineConfig) else 1
