"""Learners turn a trajectory batch into the next policy version: one contract (`base`), a file each.

`build_learner` chooses one and loads only that. A learner's start is mostly imports, and a run whose learner died waits
for them: so this module imports no torch, nor does a process that only starts the learner's actor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig

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


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import faster.

    Imported modules stay, so it is lost time to look for garbage in them. Only the losses and decoding of other models
    need scikit-learn and SciPy; accelerate is for those that are spread over devices (peft imports it itself).
    """
    gc.disable()
    try:
        import transformers.utils

        for library in ("sklearn", "scipy", "accelerate"):
            setattr(transformers.utils, f"is_{library}_available", lambda: False)
        yield
    finally:
        gc.enable()
