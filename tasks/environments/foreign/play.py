"""Defines the base class of environments that play their episodes in worker processes.

If the policy cannot have caused a failure, the episode is unjudged, and its prompt is issued again. After any other
failure, the episode keeps the reward that it has earned so far. The module `faults` has a table of all failures.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.environments.base import Episode, ResettingEnvironment
from rollflow.tasks.environments.foreign.config import ForeignEnvironment
from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded, score_fault
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.pool import MakePool, WorldPool
from rollflow.tasks.environments.foreign.resets_ahead import ResetsAhead
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.scorers.base import Score, make_storable, validate_score

SEED_BYTES = 4


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The tokens of a final answer, which the run's scorer scores because the environment computes no reward."""

    tokens: Sequence[int]


@dataclass(slots=True)
class Progress:
    """The rewards of an episode so far: `earned` is their sum, and `total` is the part of the sum that counts toward
    the score.
    """

    total: float = 0.0
    earned: float = 0.0


class ForeignEpisodes(ResettingEnvironment):
    """Plays the episodes of an environment in worker processes."""

    keeps_deadlines = True  # this class kills slow processes, and does not count the wait for a free place

    def __init__(self, config: ForeignEnvironment, make_pool: MakePool = WorldPool) -> None:
        self._config, self.make_pool = config, make_pool
        self.health = EnvironmentHealth(config.part, config.max_failures, str(config.spec["kind"]))
        self._name = f"environment {config.part}"
        self._pool: WorldPool | None = None
        self._ahead: ResetsAhead | None = None

    @property
    def resets_ahead(self) -> int:
        """Largest number of episodes for which the environment is reset before they start."""
        return self._config.resets_ahead

    def reset_ahead(self, prompts: Sequence[Prompt], issued: Sequence[Prompt] = ()) -> None:
        """Reset the environment for the next episodes, as `ResettingEnvironment.reset_ahead` specifies."""
        self._find_ahead().plan(prompts[: self.resets_ahead], issued)

    async def play(self, episode: Episode) -> Score | None:
        """Run an episode, as `Environment.play` specifies.

        Raises:
            ConfigError: too many episodes in a row failed for reasons that the policy cannot have caused.
        """
        progress = Progress()
        try:
            async with self._find_ahead().open(episode.prompt) as world:
                self.health.episodes += 1
                found = await self._play(episode, world, progress)
        except WorldEnded as ended:
            found = self._score_end(ended, progress)
        if found is None:
            return None
        # The answer is scored after the process has ended, so that a slow judge does not delay the next episode.
        if isinstance(found, FinalAnswer):
            self.health.count_success()
            return await episode.judge(found.tokens)
        if found.outcome is not Outcome.UNJUDGED:
            self.health.count_success()
        return found

    async def close(self) -> None:
        """End all worker processes."""
        if self._ahead is not None:
            await self._ahead.close()
        if self._pool is not None:
            await self._pool.close()

    async def describe(self) -> Mapping[str, Any]:
        """Create the environment in a worker process, and return the description of its tools.

        Raises:
            WorldEnded: the environment cannot be created; the message says why.
        """
        async with self._find_pool().open() as world:
            return await world.open(0)

    async def _play(self, episode: Episode, world: World, progress: Progress) -> Score | FinalAnswer | None:
        """Run an episode in a process, and keep `progress` up to date; return None if the episode is not wanted any
        more."""
        raise NotImplementedError

    async def _begin(self, episode: Episode, world: World) -> tuple[Mapping[str, Any], str | None]:
        """Create and reset the environment, unless it was reset ahead; return the description of its tools, and the
        first observation.
        """
        if not world.is_reset:
            await _reset_world(world, episode.prompt)
        return world.described, world.observation

    async def _add_messages(self, episode: Episode, role: str, texts: Sequence[str], frame: str) -> bool:
        """Append messages for the policy, or return False if they would leave no room for another turn.

        If the chat template changes earlier answers, a branch begins. `frame` is the text around a message for a policy
        without chat template.
        """
        written = [make_storable(text, len(text)) for text in texts]
        return await episode.extend_apart([{"role": role, "content": text, "frame": frame} for text in written])

    def _score_end(self, ended: WorldEnded, progress: Progress) -> Score:
        """Return the score of an episode whose process has ended early."""
        if ended.is_unjudged:
            return score_fault(self._name, 0.0, str(ended), Outcome.UNJUDGED)
        return score_fault(self._name, progress.total, str(ended), ended.outcome)

    def _score_error(self, failed: CallFailed, progress: Progress) -> Score:
        """Return the score of an episode that ended because the user's code raised an error."""
        return score_fault(self._name, progress.total, str(failed), Outcome.UNPARSABLE)

    def _validate(self, score: Score) -> Score:
        return validate_score(self._name, score)

    def _find_pool(self) -> WorldPool:
        """Return the worker pool of the running event loop; create it if there is none."""
        if self._pool is None or self._pool.loop is not asyncio.get_running_loop():
            self._pool = self.make_pool(self._config, self.health)
        return self._pool

    def _find_ahead(self) -> ResetsAhead:
        """Return the object that resets environments ahead in the worker pool of the running event loop."""
        pool = self._find_pool()
        if self._ahead is None or self._ahead.pool is not pool:
            self._ahead = ResetsAhead(pool, _reset_world)
        return self._ahead


async def _reset_world(world: World, prompt: Prompt) -> None:
    """Create and reset the environment of an episode. Row and seed depend only on the prompt."""
    seed = find_seed(prompt)
    await world.open(seed)
    await world.reset({"prompt": list(map(dict, prompt.messages)), **prompt.reference}, seed)


def find_seed(prompt: Prompt) -> int:
    """Return the seed of an episode's environment, the same for all episodes of a prompt.

    With equal seeds, the episodes of a group begin in the same state, and a run is reproducible.
    """
    return int.from_bytes(hashlib.blake2b(prompt.id.encode(), digest_size=SEED_BYTES).digest(), "big") >> 1
