"""Limits the episodes that one environment runs at the same time; further episodes wait in order of arrival.

A waiting episode starts as soon as the process of another episode has ended. If the end of a process takes longer than
`STUCK_SECONDS`, all worker processes are killed and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.guest_process import Guest
from rollflow.tasks.environments.foreign.guest_world import GuestWorld
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.settings import WorldSettings
from rollflow.tasks.environments.foreign.world import World

STUCK_SECONDS = 60.0  # largest number of seconds that a killed process may take to end


class WorldPool:
    """The worker processes of an environment, for one event loop."""

    def __init__(
        self, config: WorldSettings, health: EnvironmentHealth, build_world: Callable[..., World] = GuestWorld
    ) -> None:
        self._config, self._health, self._build_world = config, health, build_world
        self.loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(config.at_once)
        self._starting = asyncio.Lock()
        self._guest: Guest | None = None
        self._launch: asyncio.Future[None]  # the task that starts `_guest`
        self._closing: asyncio.Future[None] | None = None  # task that ends stuck worker processes
        self._numbers = itertools.count()
        self._is_slow = False  # True once the warning about slow starts was logged

    @property
    def is_full(self) -> bool:
        """True if another episode would have to wait for a place."""
        return self._places.locked()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[World]:
        """Wait until another episode may run, and start its process; kill the process at the end of the block.

        Raises:
            WorldEnded: no process can be started.
            ConfigError: the environment counts as broken, because too many episodes in a row failed.
        """
        await self._places.acquire()
        number, guest = next(self._numbers), None
        began = self._health.failure_round
        try:
            async with self._starting:
                self._health.check()
                began = self._health.failure_round
                guest = await self._start_guest()
            world = self._build_world(guest, number, self._config, self._health)
            try:
                await world.start()
                yield world
            finally:
                world.kill()
        except WorldEnded as ended:
            self._health.note_end(ended, began)
            raise
        finally:
            self._free_place(guest, number)

    async def close(self) -> None:
        """End all processes."""
        if self._guest is not None:
            await self._guest.close()

    def _free_place(self, guest: Guest | None, number: int) -> None:
        """Let another episode start once the process of an episode has ended."""
        if guest is None or not guest.has_episode(number):
            self._places.release()
            return
        stuck = self.loop.call_later(STUCK_SECONDS, self._end_guest, guest)

        def free(_: object) -> None:
            stuck.cancel()
            guest.forget(number)
            self._places.release()

        guest.end_of(number).add_done_callback(free)

    def _end_guest(self, guest: Guest) -> None:
        """End all worker processes, because one episode's process does not end; other running episodes get no
        reward."""
        if not guest.lost.is_set():
            logging.getLogger(__name__).warning(
                "environment.%s: a worker process did not end within %g s, so all of them are started anew",
                self._health.name,
                STUCK_SECONDS,
            )
            self._closing = asyncio.ensure_future(guest.close())

    async def _start_guest(self) -> Guest:
        """Return the running worker processes; start them first if there are none, and wait for the environment's
        import."""
        if self._guest is None or self._guest.lost.is_set():
            self._guest = Guest(self._config.interpreter, self._config.spec)
            self._launch = asyncio.ensure_future(self._guest.start())
        guest = self._guest
        try:
            await asyncio.shield(self._launch)  # if this episode is cancelled, other episodes still wait for the start
        except OSError as error:
            await guest.close()
            raise WorldEnded(
                Outcome.UNJUDGED, f"the worker process of the environment could not be started ({error})"
            ) from None
        self._check_ready(await self._wait_ready(guest))
        return guest

    async def _wait_ready(self, guest: Guest) -> Mapping[str, Any]:
        seconds = self._config.start_seconds
        try:
            async with asyncio.timeout(None if guest.ready.done() else seconds):
                return await asyncio.shield(guest.ready)
        except TimeoutError:
            self._health.hangs += 1
            await guest.close()
            raise WorldEnded(
                Outcome.UNJUDGED, f"the import of the environment took more than start_seconds = {seconds:g}"
            ) from None
        finally:
            if guest.ready.done() and "error" in guest.ready.result():
                await guest.close()  # the next episode imports the environment again

    def _check_ready(self, found: Mapping[str, Any]) -> None:
        if "error" in found:
            raise WorldEnded(Outcome.UNJUDGED, f"the import of the environment failed with {found['error']}")
        if found.get("threads") and not self._is_slow:
            self._is_slow = True
            logging.getLogger(__name__).warning(
                "environment.%s: its import starts %d threads, so each episode imports it again in a new process, "
                "which is slow; start no thread at the import",
                self._health.name,
                found["threads"],
            )


MakePool = Callable[[WorldSettings, EnvironmentHealth], WorldPool]  # creates the pool of an environment
