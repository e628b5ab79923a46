"""Builds the environments in which the policy plays episodes, reads their counters, and closes them.

The module `base` defines the contract of all environments.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import (
    EnvironmentConfig,
    FrozenLakeEnvironment,
    GymnasiumEnvironment,
    ImportEnvironment,
    KuhnPokerEnvironment,
    MixedEnvironment,
    SingleTurnEnvironment,
    SokobanEnvironment,
    TimedEnvironmentConfig,
    ToolsEnvironment,
    TrlEnvironment,
)
from rollflow.tasks.environments.foreign.pool import MakePool, WorldPool


def build_environment(config: EnvironmentConfig, make_pool: MakePool = WorldPool) -> Environment:
    """Create the environment that the config section `[environment]` describes. `make_pool` creates the pool of the
    environment's worker processes.

    Raises:
        ConfigError: there is no environment class at the import path in the config.
    """
    match config:
        case SingleTurnEnvironment():
            from rollflow.tasks.environments.single_turn import SINGLE_TURN

            return SINGLE_TURN
        case FrozenLakeEnvironment() | SokobanEnvironment():
            from rollflow.tasks.environments.grid_game import GridGame

            return GridGame()
        case KuhnPokerEnvironment():
            from rollflow.tasks.environments.kuhn_poker import KuhnPoker

            return KuhnPoker()
        case ImportEnvironment():
            from rollflow.tasks.environments.imported import ImportedEnvironment

            return ImportedEnvironment(config)
        case TrlEnvironment():
            from rollflow.tasks.environments.foreign.trl import TrlEpisodes

            return TrlEpisodes(config, make_pool)
        case GymnasiumEnvironment():
            from rollflow.tasks.environments.foreign.gym import GymnasiumEpisodes

            return GymnasiumEpisodes(config, make_pool)
        case ToolsEnvironment():
            from rollflow.tasks.environments.tool_use.play import ToolEpisodes

            return ToolEpisodes(config, make_pool)
        case MixedEnvironment():
            from rollflow.tasks.environments.mixed import MixedEpisodes

            members = {name: build_environment(one, make_pool) for name, one in config.kinds.items()}
            limits = {name: one.limits for name, one in config.kinds.items()}
            return MixedEpisodes(config.column, config.default, members, limits)
        case TimedEnvironmentConfig():
            from rollflow.tasks.environments.timed import TimedEnvironment

            return TimedEnvironment(config)


def read_counts(environment: Environment) -> Mapping[str, Mapping[str, float]]:
    """Return the counters of an environment by kind or, for several environments, by name. Environments without worker
    processes and tools have no counters.
    """
    from rollflow.tasks.environments.foreign.play import ForeignEpisodes
    from rollflow.tasks.environments.mixed import MixedEpisodes
    from rollflow.tasks.environments.tool_use.play import ToolEpisodes

    if isinstance(environment, MixedEpisodes):
        return {
            name: {**counts, "removals": float(name in environment.removals)}
            for name, one in environment.own.items()
            for counts in read_counts(one).values()
        }
    if not isinstance(environment, ForeignEpisodes | ToolEpisodes):
        return {}
    return {environment.health.kind: environment.health.counts}


async def close_environment(environment: Environment) -> None:
    """End the worker processes and the tools of an environment; do nothing if the environment has none."""
    from rollflow.tasks.environments.foreign.play import ForeignEpisodes
    from rollflow.tasks.environments.mixed import MixedEpisodes
    from rollflow.tasks.environments.tool_use.play import ToolEpisodes

    for member in environment.own.values() if isinstance(environment, MixedEpisodes) else ():
        await close_environment(member)
    if isinstance(environment, ForeignEpisodes | ToolEpisodes):
        await environment.close()
