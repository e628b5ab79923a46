"""Builds the environments of a process, and adds up their counters."""

from __future__ import annotations

import functools

from rollflow.storage.run_records.environment_figures import EnvironmentUse
from rollflow.tasks.environments import build_environment, close_environment, read_counts
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import EnvironmentConfig
from rollflow.tasks.environments.foreign.pool import WorldPool
from rollflow.tasks.environments.spread.fleet import HostFleet
from rollflow.tasks.environments.spread.pool import SpreadPool


class UsedEnvironments:
    """The environments that a process has built, one after another or side by side. The counters of an environment are
    kept after a newer environment has replaced it.
    """

    def __init__(self, process: str, fleet: HostFleet | None = None) -> None:
        """Create the object without environments. Worker processes run in the hosts of `fleet`, or else in child
        processes of this process, whose id is `process`."""
        self._process, self._fleet = process, fleet
        self._make_pool = WorldPool if fleet is None else functools.partial(SpreadPool, fleet)
        self._built, self._open = list[Environment](), list[Environment]()

    def build(self, config: EnvironmentConfig) -> Environment:
        """Create the environment that the config section `[environment]` describes."""
        self._built.append(built := build_environment(config, self._make_pool))
        self._open.append(built)
        return built

    async def close(self, environment: Environment) -> None:
        """End the worker processes and the tools of an environment; its counters are kept."""
        self._open.remove(environment)
        await close_environment(environment)

    async def close_all(self) -> None:
        """End everything that the environments have started."""
        for environment in list(self._open):
            await self.close(environment)
        if self._fleet is not None:
            await self._fleet.close()

    def read(self) -> list[EnvironmentUse]:
        """Return the sums of the counters by kind of environment. Kinds without worker processes and tools have no
        counters.
        """
        totals = dict[str, dict[str, float]]()
        for environment in self._built:
            for kind, counts in read_counts(environment).items():
                total = totals.setdefault(kind, {})
                total |= {name: total.get(name, 0.0) + value for name, value in counts.items()}
        return [EnvironmentUse(self._process, kind, total) for kind, total in totals.items()]
