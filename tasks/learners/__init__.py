"""Learners turn a trajectory batch into the next policy version; their contract is in `base`.

`build_learner` chooses a learner and imports only that learner's module. Imports take most of the time in which a
learner starts, and a run whose learner died waits for this start. This module does not import torch, so a process that
only starts the learner's actor does not import torch either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.runtime.gc_tuning import pause_collector

if TYPE_CHECKING:
    from rollflow.tasks.learners.base import Learner, LearnerStart


def build_learner(config: TrainConfig, start: LearnerStart) -> Learner:
    """Build the learner that `[train]` asks for."""
    with pause_collector():
        disable_optional_libraries()
        match config:
            case DeepSpeedTrain() | TorchTrain() if config.ranks > 1:
                from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner

                return MultiRankLearner(config, start)
            case DeepSpeedTrain() | TorchTrain():
                from rollflow.tasks.learners.torch_learner import TorchLearner

                return TorchLearner.create(config, start)
