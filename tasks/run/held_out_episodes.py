"""Plays the episodes of held-out prompts with a model in this process, to measure accuracy during a cold start.

Once every running episode waits for a generation, all generations are computed in one batch, so that the result does
not depend on the order of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.records import Outcome, Prompt, StopReason
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.engines.stop_strings import StopWatch
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.policies.cold_start import generate_answers
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.scorers.base import Score, ScoreRequest

STALL_SECONDS = 5.0  # after this many seconds without a new request, the requested generations are computed


@dataclass(eq=False, slots=True)
class BatchedModel:
    """Generates the turns of many episodes with one model, in batches."""

    model: Any
    tokenizer: PolicyTokenizer
    temperature: float
    seed: int
    _asked: list[tuple[Turn, asyncio.Future[VersionedGeneration]]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, turn: Turn) -> VersionedGeneration:
        """Wait for the generation of a turn."""
        future: asyncio.Future[VersionedGeneration] = asyncio.get_running_loop().create_future()
        self._asked.append((turn, future))
        self._news.set()
        return await future

    async def serve(self, episodes: Sequence[asyncio.Task[Any]]) -> None:
        """Generate the requested turns until all episodes have ended."""
        for episode in episodes:
            episode.add_done_callback(lambda _: self._news.set())
        stalls = False
        while left := sum(not episode.done() for episode in episodes):
            if len(self._asked) == left or (stalls and self._asked):
                self._generate()
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALL_SECONDS):
                    await self._news.wait()
            stalls = not self._news.is_set()

    def _generate(self) -> None:
        """Generate the turn of each waiting episode."""
        asked, self._asked = self._asked, []
        self.seed += 1  # without a new seed, each turn would use the random numbers of the previous turn
        prompts, end = [list(turn.prompt.flat) for turn, _ in asked], self.tokenizer.stop_tokens[0]
        longest = max(turn.max_new_tokens for turn, _ in asked)
        made = generate_answers(self.model, prompts, end, longest, self.temperature, self.seed)
        for (turn, future), answer in zip(asked, made, strict=True):
            tokens = [*answer, end][: min(longest, turn.max_new_tokens)]
            tokens = tokens[: StopWatch(turn.stop, self.tokenizer.decode).find_end(tokens)]
            stopped = tokens[-1] == end or len(tokens) < turn.max_new_tokens
            span = TokenSpan.of(tokens, [0.0] * len(tokens), [0] * len(tokens))
            ending = StopReason.STOP if stopped else StopReason.LENGTH
            future.set_result(VersionedGeneration(Generation("", span, ending), 0))


async def play_episodes(
    model: BatchedModel,
    environment: Environment,
    prompts: Sequence[Prompt],
    longest: int,
    score: Callable[[ScoreRequest], Awaitable[Score]],
    vocabulary: int,
    ports: EnvironmentPorts,
    places: int | None = None,
) -> list[bool]:
    """Play one episode of at most `longest` tokens for each prompt; return whether each episode ended correctly.

    `places` is the largest number of episodes that run at the same time; None: no limit.
    """
    found, at_once = list[bool](), places or max(1, len(prompts))
    for some in (prompts[first : first + at_once] for first in range(0, len(prompts), at_once)):
        async with asyncio.TaskGroup() as group:
            episodes = [
                PlayedEpisode(prompt, longest, model.ask, _want_every, score, vocabulary, ports) for prompt in some
            ]
            tasks = [group.create_task(episode.play(environment)) for episode in episodes]
            group.create_task(model.serve(tasks))
        scores = [task.result() for task in tasks]
        found += [score is not None and score.outcome is Outcome.CORRECT for score in scores]
    return found


async def _want_every(_: PlayedEpisode) -> bool:
    """Return True, because a measurement of the accuracy keeps every episode."""
    return True
