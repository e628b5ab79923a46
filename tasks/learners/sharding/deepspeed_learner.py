"""A learner whose models DeepSpeed shards over the ranks."""

from __future__ import annotations

from rollflow.tasks.learners.sharding.deepspeed_backend import DeepSpeedTensors, begin_group
from rollflow.tasks.learners.sharding.sharded_learner import ShardedLearner, ShardedPolicy


class DeepSpeedPolicy(ShardedPolicy, DeepSpeedTensors):
    """A policy sharded by DeepSpeed."""


class DeepSpeedLearner(ShardedLearner):
    """A learner whose models are sharded over ranks by DeepSpeed."""

    engine, engine_of_policy = DeepSpeedTensors, DeepSpeedPolicy

    def begin_group(self) -> None:
        """See `ShardedLearner`."""
        begin_group(self.ranks, self.device)
