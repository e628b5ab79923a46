"""Divides the GPUs of the Ray cluster among a run's inference engines and its learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.reward_models import list_models, model_gpus


@dataclass(frozen=True, slots=True)
class GpuShares:
    """The number of GPUs for each inference engine, and for the learner's Ray actor. With `train.multi_node`, the
    learner's other ranks are separate actors, which reserve their own GPUs. If engines and learner share GPUs, the
    numbers are fractions.
    """

    engine: float
    learner: float


def gpu_shares(config: RunConfig) -> GpuShares:
    """Return how many GPUs each inference engine and the learner get on the present nodes of the cluster."""
    return divide_gpus(config, cluster.node_gpus())


def divide_gpus(config: RunConfig, nodes: Sequence[float]) -> GpuShares:
    """Divide GPUs among a run's inference engines and its learner. `nodes` has the number of GPUs of each node.

    Each inference engine gets `engine.tensor_parallel` GPUs, and the learner gets one GPU for each of its `train.ranks`
    processes. If the cluster has too few GPUs, and `engine.tensor_parallel` and `train.ranks` are 1, then each engine
    and the learner get an equal fraction of a GPU. Without GPUs, each share is 0. GPUs that reward models reserve are
    not given to inference engines or the learner.

    Raises:
        ConfigError: an inference engine, the learner or a reward model needs more GPUs than the cluster or one node
        has.
    """
    have, largest = sum(nodes) - _count_model_gpus(config, sum(nodes)), max(nodes, default=0.0)
    if not have:
        return GpuShares(0.0, 0.0)
    engines, width, ranks = count_engines(config), width_of(config), config.train.ranks
    together = 1 if config.train.multi_node else ranks  # Number of the learner's GPUs that must be on one node.
    needed = engines * width + ranks
    if width == ranks == 1:
        share = min(1.0, 1 / math.ceil(needed / have))
        return GpuShares(share, share)
    if together > largest:
        cure = f"set train.ranks = {largest:g}, or train.multi_node = true"
        raise ConfigError(
            f"train.ranks = {ranks}: all ranks must fit on one node, because train.multi_node is false, but the "
            f"largest node has only {largest:g} GPUs; {cure}"
        )
    if width > largest:
        raise ConfigError(
            f"engine.tensor_parallel = {width}: an engine must fit on one node, but the largest node has only "
            f"{largest:g} GPUs; set engine.tensor_parallel = {largest:g} or less"
        )
    if needed > have:
        raise ConfigError(
            f"train.ranks = {ranks} and engine.tensor_parallel = {width}: {engines} engines and the learner need "
            f"{needed} GPUs, but the cluster has only {have:g}; lower engine.replicas, engine.tensor_parallel or "
            "train.ranks"
        )
    return GpuShares(width, together)


def _count_model_gpus(config: RunConfig, have: float) -> float:
    """Return the number of GPUs that reward models reserve. Raise `ConfigError` if the reward models leave none of the
    `have` GPUs for inference engines and the learner.
    """
    needed = model_gpus(config)
    if needed and needed >= have:
        section = next(section for section, reward in list_models(config).items() if reward.gpus)
        cure = "engines and learner need GPUs, too; lower gpus or workers, or set gpus = 0 to score on CPUs"
        raise ConfigError(
            f"{section}.gpus: the reward models need {needed:g} of the {have:g} GPUs of the cluster, so too few "
            f"are left for the engines and the learner; {cure}"
        )
    return needed


def spans_gpus(config: RunConfig) -> bool:
    """Return whether the run cannot work without GPUs, because an engine or the learner is sharded over several GPUs or
    a reward model needs one.
    """
    return width_of(config) > 1 or config.train.ranks > 1 or model_gpus(config) > 0


def count_engines(config: RunConfig) -> int:
    """Return the number of inference engines. A separate evaluation engine is included if it is configured like the
    other engines.
    """
    return config.engine.replicas + (config.evaluation_engine(on_cpu=False) == config.engine)


def width_of(config: RunConfig) -> int:
    """Return the number of GPUs over which one inference engine is sharded."""
    return config.engine.tensor_parallel if isinstance(config.engine, VllmEngineConfig) else 1
