"""Learners turn a trajectory batch into the next policy version: one contract (`base`), a file each.

`build_learner` chooses one and loads only that. A learner's start is mostly imports, and a run whose learner died waits
for them: so this module imports no torch, nor does a process that only starts the learner's actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.policies.quick_imports import quick_imports

if TYPE_CHECKING:
    from rollflow.tasks.learners.base import Learner, LearnerStart


def build_learner(config: TrainConfig, start: LearnerStart) -> Learner:
    """The learner that `[train]` asks for, before its first step."""
    with quick_imports():
        match config:
            case DeepSpeedTrain() | TorchTrain() if config.ranks > 1:
                from rollflow.tasks.learners.ranked import RankedLearner

                return RankedLearner(config, start)
            case _:
                from rollflow.tasks.learners.torch_learner import TorchLearner

                return TorchLearner.begun(config, start)
