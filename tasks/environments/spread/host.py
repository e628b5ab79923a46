"""Runs the worker processes of environments on one node, for episodes that another process plays.

The methods return errors of the environment as values instead of raising them, because an exception may be damaged on
its way to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.pool import WorldPool
from rollflow.tasks.environments.foreign.settings import WorldSettings
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.environments.guest.wire import pack_line

HOST_COUNTERS = ("hangs", "kills", "crashes", "seconds")  # counters of `EnvironmentHealth` that a host counts
NEVER = 1 << 62  # a host never declares an environment broken, because it does not see which episodes succeed


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The answer of a host: a line of the worker process, or why there is none."""

    line: bytes = b""  # empty: the process wrote an answer that cannot be sent
    outcome: Outcome | None = None  # set if the process ended; `reason` says why
    reason: str = ""
    refusal: str = ""  # what the user must change in the config
    counts: tuple[float, ...] = ()  # the values of `HOST_COUNTERS` for the episode's environment on this host


@dataclass(eq=False)
class HostedPool:
    """The worker processes of one environment on a host, with their counters."""

    settings: WorldSettings
    name: str
    health: EnvironmentHealth = field(init=False)
    pool: WorldPool = field(init=False)

    def __post_init__(self) -> None:
        self.health = EnvironmentHealth(self.name, NEVER)
        self.pool = WorldPool(self.settings, self.health)

    @property
    def counts(self) -> tuple[float, ...]:
        """The values of `HOST_COUNTERS`."""
        return tuple(float(getattr(self.health, name)) for name in HOST_COUNTERS)


class HostedEpisode:
    """The worker process of one episode."""

    def __init__(self, place: HostedPool) -> None:
        self.place = place
        self._stack = contextlib.AsyncExitStack()
        self._opening = asyncio.create_task(self._stack.enter_async_context(place.pool.open()))
        self._asking: asyncio.Task[Mapping[str, Any]] | None = None  # the newest request

    async def open(self) -> World:
        """Wait until the process has started.

        Raises:
            WorldEnded: the process cannot be started, or the episode was closed in the meantime.
        """
        await asyncio.wait({self._opening})
        if self._opening.cancelled():
            raise WorldEnded(Outcome.UNJUDGED, "the episode was closed before the environment's process had started")
        return self._opening.result()

    async def exchange_line(
        self, line: bytes, what: str, seconds: float | None, *, turn_begins: bool
    ) -> Mapping[str, Any]:
        """Send a request to the process, and return its answer, as `World.exchange_line` specifies."""
        world = await self.open()
        if turn_begins:
            world.begin_turn()
        self._asking = asyncio.create_task(world.exchange_line(line, what, seconds))
        await asyncio.wait({self._asking})
        if self._asking.cancelled():
            raise WorldEnded(
                Outcome.UNJUDGED, f"the episode was closed while the environment's process answered {what}"
            )
        return self._asking.result()

    async def close(self) -> None:
        """Kill the process, or stop its start; a request in flight gets no answer."""
        tasks = {one for one in (self._opening, self._asking) if one is not None}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._stack.aclose()


class WorldHost:
    """The worker processes of a run's environments on one node."""

    def __init__(self) -> None:
        self._pools: dict[int, HostedPool] = {}
        self._episodes: dict[int, HostedEpisode] = {}
        self._closed = set[int]()  # episodes whose end arrived before their start; the order of calls is not fixed

    async def open_episode(self, number: int, pool: int, settings: WorldSettings, name: str) -> HostAnswer:
        """Start the process of an episode.

        Args:
            number: number of the episode; no other episode ever gets this number.
            pool: number of the environment.
            name: config key that names the environment.
        """
        if number in self._closed:
            return HostAnswer(
                outcome=Outcome.UNJUDGED, reason="the episode was closed before the environment's process had started"
            )
        if pool not in self._pools:
            self._pools[pool] = HostedPool(settings, name)
        place = self._pools[pool]
        episode = self._episodes[number] = HostedEpisode(place)
        try:
            await episode.open()
        except WorldEnded as ended:
            return HostAnswer(outcome=ended.outcome, reason=str(ended), counts=place.counts)
        except ConfigError as error:
            return HostAnswer(refusal=str(error), counts=place.counts)
        return HostAnswer(counts=place.counts)

    async def exchange_line(
        self, number: int, line: bytes, what: str, seconds: float | None, turn_begins: bool
    ) -> HostAnswer:
        """Send a request to the process of an episode, and return its answer, as `World.exchange_line` specifies. With
        `turn_begins`, the time limit of a turn begins again before the request.
        """
        if (episode := self._episodes.get(number)) is None:
            return HostAnswer(outcome=Outcome.UNJUDGED, reason=f"the environment's process had ended before {what}")
        try:
            answer = await episode.exchange_line(line, what, seconds, turn_begins=turn_begins)
            return HostAnswer(pack_line(dict(answer)), counts=episode.place.counts)
        except WorldEnded as ended:
            return HostAnswer(outcome=ended.outcome, reason=str(ended), counts=episode.place.counts)
        except RecursionError:  # the answer is nested too deeply to be sent
            return HostAnswer(line=b"", counts=episode.place.counts)

    async def close_episode(self, number: int) -> None:
        """Kill the process of an episode, if the episode has one."""
        if (episode := self._episodes.pop(number, None)) is None:
            self._closed.add(number)
        else:
            await episode.close()

    async def close_pool(self, pool: int) -> None:
        """End all worker processes of an environment."""
        if (place := self._pools.pop(pool, None)) is None:
            return
        for number in [number for number, one in self._episodes.items() if one.place is place]:
            await self.close_episode(number)
        await place.pool.close()

    async def answer_call(self) -> None:
        """Return at once. The answer shows that the host is alive."""

    async def close(self) -> None:
        """End all worker processes."""
        for pool in list(self._pools):
            await self.close_pool(pool)
