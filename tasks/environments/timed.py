"""Simulates an environment with several turns, which only waits and adds meaningless tokens.

    reset --> ( generate --> step --> add )* --> generate --> step --> judge

- The number of turns and their token limits depend only on the seed and the prompt of the episode, so a long episode
  that is discarded and played again is long again. The seconds of a step, failures and hangs also depend on the
  attempt, as on a real machine.
- An environment that fails or hangs ends its episode as unjudged, because the policy did not cause the failure.
- Time is read only from the event loop, so the environment also runs on a virtual clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from array import array
from collections.abc import Awaitable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import islice

from rollflow.storage.records import Outcome
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.runtime.sections import LONGEST_SECONDS
from rollflow.tasks.scorers.base import Score

FAILED = Score(0.0, "the simulated environment failed", Outcome.UNJUDGED)
HUNG = Score(0.0, "the simulated environment hung", Outcome.UNJUDGED)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a simulated environment: how many seconds it takes, and the score of the episode if the step
    fails."""

    seconds: float
    failure: Score | None = None


class TimedEnvironment(Environment):
    """A simulated environment whose steps only wait."""

    def __init__(self, config: TimedEnvironmentConfig, tokens_per_tick: int = 1) -> None:
        """Create the environment. At most `config.places` of its episodes run at the same time.

        Args:
            tokens_per_tick: number of real tokens that one token of the simulated engines stands for.
        """
        self._config, self._tick = config, tokens_per_tick
        self.observation_tokens = math.ceil(config.observation_tokens / tokens_per_tick)
        self._places: AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(config.places) if config.places else contextlib.nullcontext()
        )

    async def play(self, episode: Episode) -> Score | None:
        """Play one episode with a random number of turns, each followed by a step."""
        async with self._places:
            limits = self.draw_limits(episode.prompt.index, episode.seed)
            seconds, failure = self.draw_times(episode.seed, episode.attempt, len(limits))
            await self.work(seconds[0])
            for turn, limit in enumerate(limits, 1):
                made = await self.ask(episode, limit)
                if made is None:
                    return None
                await self.work(seconds[turn])
                if failure is not None and turn + 1 == len(seconds):
                    return failure
                if turn == len(limits) or episode.room <= self.observation_tokens:
                    return await self.finish(episode, made)
                if self.observation_tokens:
                    episode.add((int(made.tokens[-1]),) * self.observation_tokens)
        return None

    def ask(self, episode: Episode, limit: int | None) -> Awaitable[Generation | None]:
        """Let the policy generate one turn."""
        return episode.generate(max_tokens=limit)

    def finish(self, episode: Episode, made: Generation) -> Awaitable[Score | None]:
        """Score the last turn of an episode, which ends the episode."""
        return episode.judge(made.tokens)

    def work(self, seconds: float) -> Awaitable[None]:
        """Wait for the seconds of one step or reset."""
        return asyncio.sleep(min(seconds, LONGEST_SECONDS))

    def draw_limits(self, prompt: int, seed: int) -> list[int | None]:
        """Draw the number of turns of an episode, and the largest number of tokens of each turn."""
        config, draw = self._config, random.Random(f"turns {seed}")
        z = math.sqrt(1.0 - config.correlation) * draw.gauss(0.0, 1.0)
        if config.correlation:
            z += math.sqrt(config.correlation) * random.Random(f"turns of prompt {prompt}").gauss(0.0, 1.0)
        turns = min(config.max_turns, max(1, round(config.median_turns * math.exp(config.turns_sigma * z))))
        return [self._draw_limit(draw) for _ in range(turns)]

    def draw_steps(self, seed: int, attempt: int = 0) -> Iterator[Step]:
        """Yield the reset of an episode, and then its steps without end, all drawn at random."""
        config, draw = self._config, random.Random(f"steps {seed} {attempt}")
        factor = config.slow_factor if draw.random() < config.slow_share else 1.0
        yield Step(factor * self._draw_seconds(draw, config.reset_seconds, config.reset_sigma))
        while True:
            seconds = factor * self._draw_seconds(draw, config.step_seconds, config.step_sigma)
            fate = draw.random()
            if fate < config.hangs:
                yield Step(config.hang_seconds, HUNG)
            else:
                yield Step(seconds, FAILED if fate < config.hangs + config.failures else None)

    def draw_times(self, seed: int, attempt: int, turns: int) -> tuple[array[float], Score | None]:
        """Draw the seconds of the reset and of all steps, up to the first step that fails. The second part of the
        result is the score of the episode if a step fails.

        All steps are drawn at the start, because a random generator for each episode would need 2.5 kB of memory.
        """
        seconds = array("d")
        for step in islice(self.draw_steps(seed, attempt), turns + 1):
            seconds.append(step.seconds)
            if step.failure is not None:
                return seconds, step.failure
        return seconds, None

    def _draw_limit(self, draw: random.Random) -> int | None:
        config = self._config
        if config.turn_tokens is None:
            return None
        tokens = config.turn_tokens * math.exp(config.turn_tokens_sigma * draw.gauss(0.0, 1.0))
        return max(1, round(tokens / self._tick))

    def _draw_seconds(self, draw: random.Random, typical: float, spread: float) -> float:
        z = draw.gauss(0.0, 1.0) if spread else 0.0
        if self._config.distribution == "gaussian":
            return max(0.0, typical + spread * z)
        return typical * math.exp(spread * z)
