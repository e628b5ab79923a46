"""The torch learner, sharded over its ranks by FSDP2 (option `train.sharded`)."""

from __future__ import annotations

from typing import Self

from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.forward.activation_checkpointing import find_layers
from rollflow.tasks.learners.sharding.fsdp_backend import FsdpTensors, begin_group
from rollflow.tasks.learners.sharding.sharded_learner import ShardedLearner, ShardedPolicy


class FsdpPolicy(ShardedPolicy, FsdpTensors):
    """A policy sharded by FSDP2."""


class FsdpLearner(ShardedLearner):
    """A learner whose models are sharded over ranks by FSDP2."""

    engine, engine_of_policy = FsdpTensors, FsdpPolicy

    @classmethod
    def create(cls, config: TrainBase, start: LearnerStart) -> Self:
        """See `TorchLearner`; raise `ConfigError` if the model has no list of layers."""
        made = super().create(config, start)
        find_layers(made.model, "train.sharded")
        return made

    def begin_group(self) -> None:
        """See `ShardedLearner`."""
        begin_group(self.ranks, self.device)
