"""A learner in parts on its ranks, by DeepSpeed's engines."""

from __future__ import annotations

from typing import Self

from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.learners.deepspeed_engine import DeepSpeedOptimized, begin_group
from rollflow.tasks.learners.sharded import ShardedLearner, ShardedPolicy


class DeepSpeedPolicy(ShardedPolicy, DeepSpeedOptimized):
    """A policy behind DeepSpeed's engine."""


class DeepSpeedLearner(ShardedLearner):
    """See the module's docstring."""

    engine, engine_of_policy = DeepSpeedOptimized, DeepSpeedPolicy

    @classmethod
    def begun(cls, config: Ranked, start: LearnerStart) -> Self:
        """See `TorchLearner`; raises `ConfigError` where the policy is not in float32."""
        if start.dtype != "float32":
            cure = 'with train.learner = "deepspeed" it is float32 only; choose that, or train.learner = "torch"'
            raise ConfigError(f"policy.dtype = {start.dtype}: {cure}")
        return super().begun(config, start)

    def begin_group(self) -> None:
        """See `ShardedLearner`."""
        begin_group(self.ranks)
