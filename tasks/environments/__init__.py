"""Environments: one contract (`base`), a file each, chosen by `build_environment`."""

from __future__ import annotations

from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import EnvironmentConfig, ImportEnvironment, SingleTurnEnvironment


def build_environment(config: EnvironmentConfig) -> Environment:
    """The environment that `[environment]` asks for.

    Raises:
        ConfigError: there is no environment of that import path.
    """
    match config:
        case SingleTurnEnvironment():
            from rollflow.tasks.environments.single_turn import SINGLE_TURN

            return SINGLE_TURN
        case ImportEnvironment():
            from rollflow.tasks.environments.imported import ImportedEnvironment

            return ImportedEnvironment(config)
