"""Keeps as many helpers of a run's reward actor running as the queue of responses needs (see `members`).

A started helper gets responses from the queue. A helper that is no longer needed gets no more responses, and ends once
all its responses have scores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.members import FleetLink, FleetMember, MemberFleet, PlaceLost
from rollflow.tasks.scorers.spread.spread import ScoringPlace, SpreadScorer

EXCHANGE_SECONDS = 2.0  # seconds between two calls of `Helper.exchange`


class Helper(FleetLink, Protocol):
    """A further reward actor, which scores responses for the run's reward actor."""

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score responses; each future raises `PlaceLost` if the helper is lost."""

    async def exchange(self) -> None:
        """Exchange program times with the helper, and read its counters; raise `PlaceLost` if the helper is lost."""


class HelperFleet(MemberFleet[Helper, ScoringPlace]):
    """Keeps as many helpers running as the queue of responses needs."""

    loss = "a helper of the reward actor is lost, and its responses are scored elsewhere"

    def __init__(
        self,
        spread: SpreadScorer,
        follower: QueueFollower,
        build: Callable[[], Helper],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the fleet without helpers; `build` creates a helper without starting it."""
        super().__init__(build, warn)
        self._spread, self._follower = spread, follower

    def _decide(self, now: float) -> int:
        """Return the number of helpers that the queue needs, without the reward actor itself."""
        return self._follower.decide(now, self._spread.count_wanted()) - 1

    def _open(self, member: FleetMember[Helper, ScoringPlace]) -> ScoringPlace:
        """Let a started helper score responses."""
        place = ScoringPlace(member.link.submit)
        place.open = member.stays
        self._spread.add(place)
        return place

    async def _watch(self, member: FleetMember[Helper, ScoringPlace], place: ScoringPlace) -> None:
        """Exchange times and counters with a helper until the helper has nothing to score and is no longer needed."""
        while True:
            was_idle = place.idle
            await member.link.exchange()
            if was_idle and place.idle and not member.stays:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    await place.lost.wait()
            if place.lost.is_set():
                raise PlaceLost("the actor did not return the scores of its responses")

    def _close(self, place: ScoringPlace) -> None:
        """Remove a helper; other reward actors score its responses."""
        self._spread.remove(place)

    def _share_work(self) -> None:
        """Send responses from the queue to the reward actor and to helpers, except helpers that are about to end."""
        for member in self._members:
            if member.place and not member.place.lost.is_set():
                member.place.open = member.stays
        self._spread.dispatch()
