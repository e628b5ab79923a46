"""Gives each episode a place on a host, i.e. an actor that runs worker processes of environments. As many hosts run as
the episodes need.

    claim_place --> the started host with the fewest episodes; if all are full, wait in order of arrival
    more episodes than the hosts take --> start a host; fewer --> the newest host ends after its last episode

- A host takes its share of the `at_once` episodes of each environment, so all hosts together take `at_once` episodes.
- A host that is lost, or does not answer for `answer_seconds`, is ended and replaced.
- If no host runs, and each starting host replaces a host that was lost or did not start, the waiting episodes fail.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.members import FleetLink, FleetMember, MemberFleet, PlaceLost

ENDED = "the environment actors were ended"
PING_SECONDS = 2.0  # seconds between two calls that check that a host is alive


class HostLink(FleetLink, Protocol):
    """The connection to a host."""

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the `WorldHost`; raise `PlaceLost` if the host is gone."""


class HostPlace:
    """A started host, with the number of its running episodes of each environment."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why the host is lost
        self.running = Counter[int]()

    async def call(self, seconds: float, method: str, *given: Any) -> Any:
        """Call a method of the host.

        Raises:
            PlaceLost: the host is lost, or counts as lost because it did not answer within `seconds`.
        """
        call = asyncio.ensure_future(self._link.call(method, *given))
        try:
            timeout = seconds if math.isfinite(seconds) else None
            await asyncio.wait({call, self.lost}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            self.lose(f"it did not answer {method} in {seconds:g} s")
            raise PlaceLost(self.lost.result())
        except PlaceLost as lost:
            self.lose(str(lost))
            raise
        finally:
            call.cancel()

    def lose(self, reason: str) -> None:
        """Give the host up; all calls in flight fail."""
        if not self.lost.done():
            self.lost.set_result(reason)

    @property
    def is_idle(self) -> bool:
        """True if the host has no episode."""
        return not any(self.running.values())


@dataclass(eq=False, slots=True)
class _WaitingEpisode:
    """An episode that waits for a place."""

    pool: int
    future: asyncio.Future[HostPlace]


class HostFleet(MemberFleet[HostLink, HostPlace]):
    """Keeps as many hosts running as the episodes need."""

    loss = "an environment actor is lost"

    def __init__(
        self,
        build: Callable[[], HostLink],
        follower: QueueFollower,
        most: int,
        answer_seconds: float,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the fleet without hosts. `build` creates a host without starting it, and `most` is the largest number
        of hosts.
        """
        super().__init__(build, warn)
        self._follower, self._most = follower, most
        self.answer_seconds = answer_seconds
        self.numbers = itertools.count()  # gives the next number for an episode or an environment
        self._shares: dict[int, int] = {}  # environment -> largest number of its episodes on a host
        self._waiting = list[_WaitingEpisode]()
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def places(self) -> list[HostPlace]:
        """The started hosts that are not lost."""
        return [one.place for one in self._members if one.place is not None and not one.place.lost.done()]

    def add_pool(self, at_once: int) -> int:
        """Register an environment, and return its number. At most `at_once` of its episodes run at the same time."""
        number = next(self.numbers)
        self._shares[number] = math.ceil(at_once / self._most)
        return number

    def has_room(self, pool: int) -> bool:
        """Return whether a host has room for an episode of an environment now."""
        return self._choose_place(pool) is not None

    async def claim_place(self, pool: int) -> HostPlace:
        """Wait until a host has room for an episode of an environment, and reserve the room.

        Raises:
            PlaceLost: all hosts were ended; or no host is running, and none could be started.
        """
        if self._is_closed:
            raise PlaceLost(ENDED)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        waiter = _WaitingEpisode(pool, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._share_work()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.free_place(waiter.future.result(), pool)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def free_place(self, place: HostPlace, pool: int) -> None:
        """Give the room of an ended episode to the next waiting episode."""
        place.running[pool] -= 1
        self._share_work()

    async def close(self) -> None:
        """End all hosts; no host starts afterwards."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self.run()
        finally:
            self._fail_waiting(ENDED)

    def _decide(self, now: float) -> int:
        """Return the wanted number of hosts: as many as the running and waiting episodes would fill."""
        asked = Counter(waiter.pool for waiter in self._waiting)
        for place in self.places:
            asked.update(place.running)
        wanted = max((math.ceil(count / self._shares[pool]) for pool, count in asked.items()), default=0)
        return self._follower.decide(now, wanted)

    def _open(self, member: FleetMember[HostLink, HostPlace]) -> HostPlace:
        """Return the place of a started host."""
        return HostPlace(member.link)

    async def _watch(self, member: FleetMember[HostLink, HostPlace], place: HostPlace) -> None:
        """Call a host until it has no episode and is no longer needed."""
        while member.stays or not place.is_idle:
            await place.call(self.answer_seconds, "answer_call")
            await asyncio.wait({place.lost}, timeout=PING_SECONDS)
            if place.lost.done():
                raise PlaceLost(place.lost.result())

    def _close(self, place: HostPlace) -> None:
        """Let all calls to a host fail, because the host ends."""
        place.lose("the environment actor was ended")

    def _share_work(self) -> None:
        """Give free room to the waiting episodes, in order of arrival."""
        full = set[int]()
        for waiter in list(self._waiting):
            if waiter.pool in full or waiter.future.done():
                continue
            place = self._choose_place(waiter.pool)
            if place is None:
                full.add(waiter.pool)
                continue
            place.running[waiter.pool] += 1
            waiter.future.set_result(place)
            self._waiting.remove(waiter)

    def _choose_place(self, pool: int) -> HostPlace | None:
        """Return the host with the fewest episodes among the hosts that stay and have room for an episode of this
        environment.
        """
        opened = [one.place for one in self._members if one.stays and one.place and not one.place.lost.done()]
        free = [place for place in opened if place.running[pool] < self._shares[pool]]
        return min(free, key=lambda place: place.running.total(), default=None)

    def _note_loss(self, reason: str) -> None:
        """Let the waiting episodes fail if no host is left that runs or starts for the first time."""
        if all(member.is_retry and member.place is None for member in self._members):
            self._fail_waiting(f"no environment actor is running, and the newest one failed ({reason})")

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.future.done():
                waiter.future.set_exception(PlaceLost(reason))
