"""The torch learner sharded over its ranks (`train.sharded`), by FSDP2."""

from __future__ import annotations

from typing import Self

from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.learners.fsdp_engine import FsdpOptimized, begin_group
from rollflow.tasks.learners.recomputed import layers_of
from rollflow.tasks.learners.sharded import ShardedLearner, ShardedPolicy


class FsdpPolicy(ShardedPolicy, FsdpOptimized):
    """A policy sharded by FSDP2."""


class FsdpLearner(ShardedLearner):
    """See the module's docstring."""

    engine, engine_of_policy = FsdpOptimized, FsdpPolicy

    @classmethod
    def begun(cls, config: Ranked, start: LearnerStart) -> Self:
        """See `TorchLearner`; raise `ConfigError` if the model has no list of layers."""
        made = super().begun(config, start)
        layers_of(made.model, "train.sharded")
        return made

    def begin_group(self) -> None:
        """See `ShardedLearner`."""
        begin_group(self.ranks, self.device)
