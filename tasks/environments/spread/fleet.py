"""Starts, watches and ends the hosts of a run's environments, and gives each episode a place on a host.

    claim_place --> the started host with the fewest episodes; if all are full, wait in order of arrival
    more episodes than the hosts take --> start a host; fewer --> the newest host ends after its last episode

- A host takes its share of `at_once` episodes of each environment, so that all hosts together take `at_once`.
- A host that is lost, or does not answer for `answer_seconds`, is ended and replaced, after a pause that doubles while
  hosts are lost soon after their start.
- `HostLink.end` is called for each host whose start was begun.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollflow.tasks.scorers.spread.follower import QueueFollower

LOOK_SECONDS = 1.0  # seconds between two looks at the number of episodes
PING_SECONDS = 2.0  # seconds between two calls that check that a host is alive
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between the loss of a host and the start of another one


class HostLost(Exception):
    """Raised if a host cannot be started, is gone, or does not answer."""


class HostLink(Protocol):
    """The connection to a host."""

    async def start(self) -> None:
        """Start the host; raise `HostLost` if it cannot start."""

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the `WorldHost`; raise `HostLost` if the host is gone."""

    async def end(self) -> None:
        """End the host with all its processes, without raising an error; may be called at any time."""


class HostPlace:
    """A started host, with the number of its episodes by environment."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why the host is lost
        self.running = Counter[int]()
        self.stays = True  # False if the host ends after its episodes

    async def call(self, seconds: float | None, method: str, *given: Any) -> Any:
        """Call a method of the host.

        Raises:
            HostLost: the host is lost, or did not answer in these seconds, and therefore counts as lost.
        """
        call = asyncio.ensure_future(self._link.call(method, *given))
        try:
            await asyncio.wait({call, self.lost}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            self.lose(f"it did not answer {method} in {seconds or 0:g} s")
            raise HostLost(self.lost.result())
        except HostLost as lost:
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


@dataclass(eq=False, slots=True)
class _FleetMember:
    """A host of the fleet; `place` is None until the host has started."""

    link: HostLink
    place: HostPlace | None = None
    stays: bool = True
    task: asyncio.Task[None] | None = field(default=None)


class HostFleet:
    """Keeps as many hosts running as the episodes need."""

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
        self._build, self._follower, self._most, self._warn = build, follower, most, warn
        self.answer_seconds = answer_seconds
        self.numbers = itertools.count()  # numbers of episodes and environments
        self._shares: dict[int, int] = {}  # environment -> largest number of its episodes on a host
        self._members = list[_FleetMember]()  # sorted by the time of their starts
        self._waiting = list[_WaitingEpisode]()
        self._tasks = set[asyncio.Task[None]]()
        self._following: asyncio.Task[None] | None = None
        self._pause, self._not_before = FIRST_PAUSE, 0.0

    @property
    def places(self) -> list[HostPlace]:
        """The started hosts that are not lost."""
        return [one.place for one in self._members if one.place is not None and not one.place.lost.done()]

    def add_pool(self, at_once: int) -> int:
        """Return the number of a further environment, of which at most `at_once` episodes run at the same time."""
        number = next(self.numbers)
        self._shares[number] = math.ceil(at_once / self._most)
        return number

    async def claim_place(self, pool: int) -> HostPlace:
        """Wait until a host has room for an episode of an environment, and reserve the room.

        Raises:
            HostLost: no host is running, and another one could not be started.
        """
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        waiter = _WaitingEpisode(pool, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._dispatch()
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
        """Give the room of an ended episode to the next one."""
        place.running[pool] -= 1
        self._dispatch()

    async def close(self) -> None:
        """End all hosts."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        for member in self._members:  # a host that is already ending is no member any more
            if member.task is not None:
                member.task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting("the environments were closed")

    def _dispatch(self) -> None:
        """Give free room to the waiting episodes, in order of arrival."""
        full = set[int]()
        for waiter in list(self._waiting):
            if waiter.pool in full or waiter.future.done():
                continue
            share = self._shares[waiter.pool]
            free = [one for one in self.places if one.stays and one.running[waiter.pool] < share]
            if not free:
                full.add(waiter.pool)
                continue
            place = min(free, key=lambda one: one.running.total())
            place.running[waiter.pool] += 1
            waiter.future.set_result(place)
            self._waiting.remove(waiter)

    def _count_wanted(self) -> int:
        """Return the number of hosts that the running and waiting episodes would fill."""
        asked = Counter(waiter.pool for waiter in self._waiting)
        for place in self.places:
            asked.update(place.running)
        return max((math.ceil(count / self._shares[pool]) for pool, count in asked.items()), default=0)

    async def _follow(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            wanted = self._follower.decide(now, self._count_wanted())
            for number, member in enumerate(self._members):
                member.stays = number < wanted
                if member.place is not None:
                    member.place.stays = member.stays
            self._dispatch()  # a host that was about to end may take episodes again
            if now >= self._not_before:
                for _ in range(wanted - len(self._members)):
                    self._add_member()
            await asyncio.sleep(LOOK_SECONDS)

    def _add_member(self) -> None:
        member = _FleetMember(self._build())
        self._members.append(member)
        member.task = asyncio.create_task(self._keep(member))
        self._tasks.add(member.task)
        member.task.add_done_callback(self._tasks.discard)

    async def _keep(self, member: _FleetMember) -> None:
        """Start a host, and watch it until it is lost or no longer needed; then end it."""
        began = asyncio.get_running_loop().time()
        try:
            await member.link.start()
            member.place = HostPlace(member.link)
            member.place.stays = member.stays
            self._dispatch()
            await self._watch(member.place)
        except Exception as error:  # noqa: BLE001 - whatever the error is, the next start must wait
            self._plan_restart(began)
            what = str(error) if isinstance(error, HostLost) else f"{type(error).__name__}: {error}"
            self._warn(f"an environment actor is lost: {what}")
            self._members.remove(member)
            if not self._members:
                self._fail_waiting(f"no environment actor is running: {what}")
        finally:
            if member.place is not None:
                member.place.lose("the environment actor was ended")
            if member in self._members:
                self._members.remove(member)
            await member.link.end()

    async def _watch(self, place: HostPlace) -> None:
        """Call a host until it has no episode and is no longer needed."""
        while place.stays or not place.is_idle:
            await place.call(self.answer_seconds, "answer_call")
            await asyncio.wait({place.lost}, timeout=PING_SECONDS)
            if place.lost.done():
                raise HostLost(place.lost.result())

    def _plan_restart(self, began: float) -> None:
        now = asyncio.get_running_loop().time()
        if now - began > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.future.done():
                waiter.future.set_exception(HostLost(reason))
