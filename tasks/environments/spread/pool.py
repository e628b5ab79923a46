"""Limits the episodes of one environment that run at the same time on all hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.pool import WorldPool
from rollflow.tasks.environments.foreign.settings import WorldSettings
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.environments.spread.fleet import HostFleet, HostPlace
from rollflow.tasks.environments.spread.host import HOST_COUNTERS
from rollflow.tasks.environments.spread.world import RemoteWorld
from rollflow.tasks.scorers.spread.members import PlaceLost


class SpreadPool(WorldPool):
    """The worker processes of an environment on all hosts, for one event loop."""

    def __init__(self, fleet: HostFleet, config: WorldSettings, health: EnvironmentHealth) -> None:
        super().__init__(config, health)
        self.fleet, self.number = fleet, fleet.add_pool(config.at_once)
        self._seen: dict[HostPlace, list[float]] = {}  # each host's counters that `_health` already includes
        self._closing_worlds = set[asyncio.Task[None]]()

    @property
    def is_full(self) -> bool:
        """True if another episode would have to wait for a place."""
        return super().is_full or not self.fleet.has_room(self.number)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[World]:
        """Wait until another episode may run, and start its process; kill the process at the end of the block.

        Raises:
            WorldEnded: no process can be started.
            ConfigError: the environment counts as broken, because too many episodes in a row failed.
        """
        async with self._places:
            self._health.check()
            began = self._health.failure_round
            world = RemoteWorld(self, self._config, self._health)
            try:
                await world.start()
                yield world
            except WorldEnded as ended:
                self._health.note_end(ended, began)
                raise
            finally:
                world.kill()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*self._closing_worlds, return_exceptions=True)
        calls = (place.call(self.fleet.answer_seconds, "close_pool", self.number) for place in self.fleet.places)
        await asyncio.gather(*calls, return_exceptions=True)

    def release(self, place: HostPlace, episode: int) -> None:
        """Kill the process of an episode in the background; then another episode may use its room."""
        task = asyncio.ensure_future(self._close_episode(place, episode))
        self._closing_worlds.add(task)
        task.add_done_callback(self._closing_worlds.discard)

    async def _close_episode(self, place: HostPlace, episode: int) -> None:
        try:
            with contextlib.suppress(PlaceLost):  # a lost host has no process any more
                await place.call(self.fleet.answer_seconds, "close_episode", episode)
        finally:
            self.fleet.free_place(place, self.number)

    def note_counts(self, place: HostPlace, counts: Sequence[float]) -> None:
        """Add what a host has counted since its last answer. Answers may arrive out of order. The answer to a call for
        an episode that the host does not know has no counts.
        """
        seen = self._seen.setdefault(place, [0.0] * len(HOST_COUNTERS))
        for number, (name, value) in enumerate(zip(HOST_COUNTERS, counts, strict=False)):
            if (more := value - seen[number]) > 0:
                seen[number] = value
                known = getattr(self._health, name)  # an int, or a number of seconds
                setattr(self._health, name, known + type(known)(more))
