"""A learner in parts on its ranks, by DeepSpeed's engines."""

from __future__ import annotations

from rollflow.tasks.learners.deepspeed_engine import DeepSpeedOptimized, begin_group
from rollflow.tasks.learners.sharded import ShardedLearner, ShardedPolicy


class DeepSpeedPolicy(ShardedPolicy, DeepSpeedOptimized):
    """A policy behind DeepSpeed's engine."""


class DeepSpeedLearner(ShardedLearner):
    """See the module's docstring."""

    engine, engine_of_policy = DeepSpeedOptimized, DeepSpeedPolicy

    def begin_group(self) -> None:
        """See `ShardedLearner`."""
        begin_group(self.ranks, self.device)
