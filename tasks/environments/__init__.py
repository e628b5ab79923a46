"""Environments: `base` has the contract, and each kind of environment has one file."""

from __future__ import annotations

from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import EnvironmentConfig, ImportEnvironment, SingleTurnEnvironment


def build_environment(config: EnvironmentConfig) -> Environment:
    """Build the environment of the kind that `[environment]` names.

    Raises:
        ConfigError: no environment has this import path.
    """
    match config:
        case SingleTurnEnvironment():
            from rollflow.tasks.environments.single_turn import SINGLE_TURN

            return SINGLE_TURN
        case ImportEnvironment():
            from rollflow.tasks.environments.imported import ImportedEnvironment

            return ImportedEnvironment(config)
