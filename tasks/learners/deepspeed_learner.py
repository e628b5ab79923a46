"""A learner sharded over its ranks by DeepSpeed."""

from __future__ import annotations

from rollflow.tasks.learners.deepspeed_engine import DeepSpeedOptimized, begin_group
from rollflow.tasks.learners.sharded import ShardedLearner, ShardedPolicy


class DeepSpeedPolicy(ShardedPolicy, DeepSpeedOptimized):
    """A policy sharded by DeepSpeed."""


class DeepSpeedLearner(ShardedLearner):
    """See the module's docstring."""

    engine, engine_of_policy = DeepSpeedOptimized, DeepSpeedPolicy

    def begin_group(self) -> None:
        """See `ShardedLearner`."""
        begin_group(self.ranks, self.device)
