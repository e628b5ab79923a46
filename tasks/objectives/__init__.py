"""Objectives: one contract (`base`), presets made of parts (a file each), or a person's own; pure torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.objectives.config import ImportObjective, ObjectiveConfig, PartsObjective

if TYPE_CHECKING:
    from rollflow.tasks.objectives.base import Objective


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `[train.objective]` asks for.

    Raises:
        ConfigError: there is no objective of that import path.
    """
    match config:
        case PartsObjective():
            from rollflow.tasks.objectives.parts import ObjectiveOfParts

            return ObjectiveOfParts(config)
        case ImportObjective():
            from rollflow.tasks.objectives.imported import ImportedObjective

            return ImportedObjective(config)
