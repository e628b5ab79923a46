"""Training objectives (losses). An objective is a preset built from parts such as ratio, surrogate and KL penalty, or a
user-defined class (see `base`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.objectives.config import ImportObjective, ObjectiveConfig, PartsObjective

if TYPE_CHECKING:
    from rollflow.tasks.objectives.base import Objective


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the objective that the configuration section `[train.objective]` describes.

    Raises:
        ConfigError: the import path of a user-defined objective does not name a class that derives from `Objective`.
    """
    match config:
        case PartsObjective():
            from rollflow.tasks.objectives.parts import ObjectiveOfParts

            return ObjectiveOfParts(config)
        case ImportObjective():
            from rollflow.tasks.objectives.imported import ImportedObjective

            return ImportedObjective(config)
