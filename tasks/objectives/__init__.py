"""Objectives: one contract (`base`), a file each, chosen by `build_objective`; advantages and packing: pure torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollflow.tasks.objectives.config import DecoupledPpoObjective, GrpoObjective, ImportObjective, ObjectiveConfig

if TYPE_CHECKING:
    from rollflow.tasks.objectives.base import Objective


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `[train.objective]` asks for.

    Raises:
        ConfigError: there is no objective of that import path.
    """
    match config:
        case GrpoObjective():
            from rollflow.tasks.objectives.grpo import Grpo

            return Grpo(config)
        case DecoupledPpoObjective():
            from rollflow.tasks.objectives.decoupled_ppo import DecoupledPpo

            return DecoupledPpo(config)
        case ImportObjective():
            from rollflow.tasks.objectives.imported import ImportedObjective

            return ImportedObjective(config)
