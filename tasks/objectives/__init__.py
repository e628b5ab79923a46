"""Objectives: one contract (`base`), presets built from parts (one file each), or a user-defined class; pure torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.objectives.config import ImportObjective, ObjectiveConfig, PartsObjective

if TYPE_CHECKING:
    from rollflow.tasks.objectives.base import Objective


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the objective that `[train.objective]` asks for.

    Raises:
        ConfigError: the import path names no objective.
    """
    match config:
        case PartsObjective():
            from rollflow.tasks.objectives.parts import ObjectiveOfParts

            return ObjectiveOfParts(config)
        case ImportObjective():
            from rollflow.tasks.objectives.imported import ImportedObjective

            return ImportedObjective(config)
