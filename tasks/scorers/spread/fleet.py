"""Starts, watches and ends the helpers of a run's reward actor, as many as the queue of responses needs.

    follower.decide --> fewer helpers than wanted: start one --started--> spread.add --> gets responses
                    `-> more than wanted: the newest gets no more responses --all scored--> end

- `Helper.end` is called for each helper whose start was begun, so nothing of a helper remains.
- A lost helper is replaced, after a pause that doubles while helpers are lost soon after their start.
- A helper that is about to end continues if the queue grows again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.spread import PlaceLost, ScoringPlace, SpreadScorer

LOOK_SECONDS = 1.0  # seconds between two looks at the queue
EXCHANGE_SECONDS = 2.0  # seconds between two calls of `Helper.exchange`
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between the loss of a helper and the start of another one


class Helper(Protocol):
    """A place that scores responses for the reward actor."""

    async def start(self) -> None:
        """Start the helper; raise `PlaceLost` if it cannot start."""

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score responses; each future raises `PlaceLost` if the helper is lost."""

    async def exchange(self) -> None:
        """Exchange program times with the helper, and read its counters; raise `PlaceLost` if the helper is lost."""

    async def end(self) -> None:
        """End the helper with all its processes, without raising an error; may be called at any time."""


@dataclass(eq=False, slots=True)
class _Member:
    """A helper of the fleet; `place` is None until the helper has started."""

    helper: Helper
    task: asyncio.Task[None] | None = None
    place: ScoringPlace | None = None
    stays: bool = True  # False if the helper ends once its responses are scored


class HelperFleet:
    """Keeps as many helpers running as the queue of responses needs."""

    def __init__(
        self,
        spread: SpreadScorer,
        follower: QueueFollower,
        build: Callable[[], Helper],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the fleet without helpers; `build` creates a helper without starting it."""
        self._spread, self._follower, self._build, self._warn = spread, follower, build, warn
        self._members = list[_Member]()  # sorted by the time of their starts
        self._tasks = set[asyncio.Task[None]]()  # a task may end after its helper was removed from the members
        self._pause, self._not_before = FIRST_PAUSE, 0.0

    @property
    def count(self) -> int:
        """Number of helpers that have started and not ended."""
        return sum(member.place is not None for member in self._members)

    async def run(self) -> None:
        """Follow the queue until the task is cancelled; then end all helpers."""
        try:
            while True:
                self._follow(asyncio.get_running_loop().time())
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for member in self._members:
                if member.task:
                    member.task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _follow(self, now: float) -> None:
        wanted = self._follower.decide(now, self._spread.count_wanted()) - 1
        for number, member in enumerate(self._members):
            member.stays = number < wanted
            if member.place and not member.place.lost.is_set():
                member.place.open = member.stays
        self._spread.dispatch()  # a helper that was about to end may accept responses again
        if now >= self._not_before:
            for _ in range(wanted - len(self._members)):
                member = _Member(self._build())
                self._members.append(member)
                member.task = asyncio.create_task(self._keep(member))
                self._tasks.add(member.task)
                member.task.add_done_callback(self._tasks.discard)

    async def _keep(self, member: _Member) -> None:
        """Start a helper, and watch it until it is lost or no longer needed; then end it."""
        began = asyncio.get_running_loop().time()
        try:
            await member.helper.start()
            member.place = ScoringPlace(member.helper.submit)
            member.place.open = member.stays
            self._spread.add(member.place)
            await self._watch(member, member.place)
        except Exception as error:  # noqa: BLE001 - whatever the error is, the next start must wait
            self._plan_restart(began)
            what = str(error) if isinstance(error, PlaceLost) else f"{type(error).__name__}: {error}"
            self._warn(f"a helper of the reward actor is lost, and its responses are scored elsewhere: {what}")
        finally:
            if member.place:
                self._spread.remove(member.place)
            self._members.remove(member)
            await member.helper.end()

    async def _watch(self, member: _Member, place: ScoringPlace) -> None:
        """Exchange with a helper until it has nothing to score and is no longer needed."""
        while True:
            was_idle = place.idle
            await member.helper.exchange()
            if was_idle and place.idle and not member.stays:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    await place.lost.wait()
            if place.lost.is_set():
                raise PlaceLost("it did not return the scores of its responses")

    def _plan_restart(self, began: float) -> None:
        now = asyncio.get_running_loop().time()
        if now - began > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
