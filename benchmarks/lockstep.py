"""Defines simulated runs with other scheduling rules, with which asynchronous episodes are compared.

`ArealRun` follows AReaL's rule: admission counts started episodes, and no episode's age is checked when a batch is
formed. An episode may then be older than alpha.

In lock-step, all environments step together. In each round, all episodes of a batch generate a turn, and the
environments step when the last episode has generated; the next round begins when the last environment has stepped.
`LockstepRun` is a simulated run in which batches are also generated one after the other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

from benchmarks.baselines import BatchRun
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.formation import Formation
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.simulation.world import SimulatedRun


class Rounds:
    """A barrier at which the episodes of a batch wait for each other. An episode that has ended does not delay the
    others.
    """

    def __init__(self, size: int) -> None:
        """Make a barrier for `size` episodes."""
        self._size = size
        self._begun = self._waiting = 0
        self._playing: set[Episode] = set()
        self._round = asyncio.Event()

    def join(self, episode: Episode) -> None:
        """Count an episode that begins."""
        self._begun += 1
        self._playing.add(episode)

    def leave(self, episode: Episode) -> None:
        """Forget an episode that takes no further turn."""
        self._playing.discard(episode)
        self._open()

    async def meet(self) -> None:
        """Wait until every episode of the batch has arrived."""
        self._waiting += 1
        arrived = self._round
        self._open()
        await arrived.wait()

    def _open(self) -> None:
        if self._waiting and self._waiting == len(self._playing) and self._begun % self._size == 0:
            self._waiting = 0
            self._round.set()
            self._round = asyncio.Event()


class LockstepEnvironment(TimedEnvironment):
    """A timed environment in which all episodes of a batch wait for each other after each generation and each step."""

    def __init__(self, config: TimedEnvironmentConfig, tokens_per_tick: int, size: int) -> None:
        super().__init__(config, tokens_per_tick)
        self._rounds = Rounds(size)

    async def play(self, episode: Episode) -> Score | None:
        self._rounds.join(episode)
        try:
            return await super().play(episode)
        finally:
            self._rounds.leave(episode)

    async def finish(self, episode: Episode, made: Generation) -> Score | None:
        self._rounds.leave(episode)  # leave first, because the score may wait for the whole batch
        return await super().finish(episode, made)

    async def ask(self, episode: Episode, limit: int | None) -> Generation | None:
        made = await super().ask(episode, limit)
        await self._rounds.meet()
        return made

    async def work(self, seconds: float) -> None:
        await super().work(seconds)
        await self._rounds.meet()


class LockstepRun(BatchRun):
    """A simulated run in which all episodes of a batch step together."""

    lockstep_type: type[LockstepEnvironment] = LockstepEnvironment

    def _build_environment(self) -> Environment:
        section = self.config.environment
        assert isinstance(section, TimedEnvironmentConfig)
        size = self.config.groups * self.config.group_size
        return self.lockstep_type(section, self.engine.tokens_per_tick, size)


class AgelessFormation(Formation):
    """Forms a batch as soon as it is full, however old its groups are."""

    def oldest_allowed(self, number: int) -> float:
        return -math.inf

    def must_wait(self, number: int, running: Iterable[int], *, learner_is_busy: bool, is_lost: bool) -> bool:
        return False


class ArealScheduler(RolloutScheduler):
    """A scheduler that admits episodes as AReaL's staleness manager does: up to (version + 1 + alpha) batches of
    running and accepted episodes.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._formation = AgelessFormation(self.limits, self.buffer, self._starts)


class ArealRun(SimulatedRun):
    """A simulated run in which the age of an episode is not bounded."""

    scheduler_type = ArealScheduler
    check_batch = staticmethod(lambda staged, async_ratio: None)
