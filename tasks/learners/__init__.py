"""A learner trains the policy: it turns a batch of trajectories into the next version of the policy's weights. The
module `base` defines the interface of all learners.

`build_learner` imports only the module of the configured learner, because imports take most of the start-up time. This
module does not import torch, so that a process that only starts the learner's Ray actor starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.runtime.gc_tuning import pause_collector

if TYPE_CHECKING:
    from rollflow.tasks.learners.base import Learner, LearnerStart


def build_learner(config: TrainConfig, start: LearnerStart) -> Learner:
    """Build the learner that the configuration section `[train]` describes."""
    with pause_collector():
        disable_optional_libraries()
        match config:
            case DeepSpeedTrain() | TorchTrain() if config.ranks > 1:
                from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner

                return MultiRankLearner(config, start)
            case DeepSpeedTrain() | TorchTrain():
                from rollflow.tasks.learners.torch_learner import TorchLearner

                return TorchLearner.create(config, start)
