"""Environments: one contract (`base`) and one file for each kind; `build_environment` builds the configured one."""

from __future__ import annotations

from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import EnvironmentConfig, ImportEnvironment, SingleTurnEnvironment


def build_environment(config: EnvironmentConfig) -> Environment:
    """Build the environment that `[environment]` names.

    Raises:
        ConfigError: there is no environment with that import path.
    """
    match config:
        case SingleTurnEnvironment():
            from rollflow.tasks.environments.single_turn import SINGLE_TURN

            return SINGLE_TURN
        case ImportEnvironment():
            from rollflow.tasks.environments.imported import ImportedEnvironment

            return ImportedEnvironment(config)
