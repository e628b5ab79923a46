"""Divides the cluster's GPUs among a run's engines and its learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.reward_models import list_models, model_gpus
from rollflow.tasks.scorers.config import name_section


@dataclass(frozen=True, slots=True)
class GpuShares:
    """The number of GPUs of each engine, and of the learner's actor; a fraction if they share GPUs."""

    engine: float
    learner: float


def gpu_shares(config: RunConfig) -> GpuShares:
    """Return the GPU shares of the engines and the learner on the cluster's current nodes; see `divide_gpus`."""
    return divide_gpus(config, cluster.node_gpus())


def divide_gpus(config: RunConfig, nodes: Sequence[float]) -> GpuShares:
    """Divide the GPUs of the nodes among the engines and the learner; `nodes` holds the number of GPUs of each node.

    An engine gets `engine.tensor_parallel` GPUs, and the learner gets one GPU for each of its `train.ranks`. If
    `engine.tensor_parallel` and `train.ranks` are 1 and the cluster has too few GPUs, each engine and the learner get
    an equal fraction of a GPU. Without GPUs, each share is 0. The GPUs that reward models reserve are left out.

    Raises:
        ConfigError: an engine, the learner or a reward model needs GPUs, and the cluster or one node has too few.
    """
    have, largest = sum(nodes) - _count_model_gpus(config, sum(nodes)), max(nodes, default=0.0)
    if not have:
        return GpuShares(0.0, 0.0)
    engines, width, ranks = count_engines(config), width_of(config), config.train.ranks
    together = 1 if config.train.multi_node else ranks  # number of the learner's GPUs that must be on one node
    needed = engines * width + ranks
    if width == ranks == 1:
        share = min(1.0, 1 / math.ceil(needed / have))
        return GpuShares(share, share)
    if together > largest:
        cure = f"set train.ranks = {largest:g}, or train.multi_node = true"
        raise ConfigError(
            f"train.ranks = {ranks}: without train.multi_node all ranks run on one node, and the largest "
            f"node has {largest:g} GPUs; {cure}"
        )
    if width > largest:
        raise ConfigError(
            f"engine.tensor_parallel = {width}: an engine runs on one node, and the largest node has "
            f"{largest:g} GPUs; set engine.tensor_parallel = {largest:g} or less"
        )
    if needed > have:
        raise ConfigError(
            f"train.ranks = {ranks} and engine.tensor_parallel = {width}: {engines} engines and the learner "
            f"need {needed} GPUs, and the cluster has {have:g}; lower engine.replicas, "
            "engine.tensor_parallel or train.ranks"
        )
    return GpuShares(width, together)


def _count_model_gpus(config: RunConfig, have: float) -> float:
    """Return the number of GPUs that reward models reserve; raise `ConfigError` if they leave none of `have`."""
    needed = model_gpus(config)
    if needed and needed >= have:
        section = next(name_section(name) for name, reward in list_models(config).items() if reward.gpus)
        cure = "engines and learner need GPUs, too; lower gpus or workers, or set gpus = 0 to score on CPUs"
        raise ConfigError(f"{section}.gpus: the reward models need {needed:g} GPUs of the cluster's {have:g}; {cure}")
    return needed


def spans_gpus(config: RunConfig) -> bool:
    """Return whether the run needs GPUs: to shard an engine or the learner, or for a reward model."""
    return width_of(config) > 1 or config.train.ranks > 1 or model_gpus(config) > 0


def count_engines(config: RunConfig) -> int:
    """Return the number of engines; a separate evaluation engine counts if it is configured like the other engines."""
    return config.engine.replicas + (config.evaluation_engine(on_cpu=False) == config.engine)


def width_of(config: RunConfig) -> int:
    """Return the number of GPUs that one engine is sharded over."""
    return config.engine.tensor_parallel if isinstance(config.engine, VllmEngineConfig) else 1
