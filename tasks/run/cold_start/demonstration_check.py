"""Plays the first demonstrations of a cold start in the run's own environment, and reports differences.

A prompt source gives both sides of a demonstration: what the policy says, and what the environment adds. If the
environment adds something else in the run, the policy is trained on contexts that it never reads in the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from rollflow.storage.records import Outcome, Prompt, Trajectory
from rollflow.tasks.environments.config import GameEnvironment, ImportEnvironment
from rollflow.tasks.policies.demonstrations import Demonstration
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run.cold_start.demonstrated_episodes import DONE, DemonstratedEpisodes, accept_every, want_every
from rollflow.tasks.run.cold_start.environment_thread import EnvironmentThread
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.scorers.base import Score

PLAYED = 4  # number of demonstrations of each prompt source that are played
SECONDS = 10.0  # time limit of an episode, in seconds
MARGIN = 1.0  # further seconds for an episode whose environment blocks its thread, and so its time limit
SHOWN = 12  # number of tokens that a note shows
ADVICE = "correct the turns of the prompt source, or the environment (a random environment cannot be compared)"


def compare_demonstrations(config: RunConfig, prompts: RunPrompts, tokenizer: PolicyTokenizer) -> list[str]:
    """Play demonstrations with several turns in a game or in a user-defined environment. Return a note on the first
    episode that differs from its demonstration, or that gets no reward. An environment that asks a language model is
    not played, because the model says something else each time.

    Raises:
        ConfigError: a demonstration is too long for the policy's context, or its environment cannot be created.
    """
    environment = config.environment
    if config.policy.cold_start is None or not isinstance(environment, GameEnvironment | ImportEnvironment):
        return []
    if environment.endpoint_roles:
        return []
    demonstrated, thread = DemonstratedEpisodes(config, tokenizer), EnvironmentThread(environment)
    try:
        for source, position in product(range(len(config.prompts)), range(PLAYED)):
            prompt, question = prompts.find_demonstration(source, position)
            if question.turns:
                trial = _Trial(config, tokenizer, demonstrated, prompt, question)
                if fault := trial.find_fault(thread):
                    where = f"prompts.{source}: the demonstration of the question {question.text!r}"
                    return [f"{where} does not fit the environment: {fault}; {ADVICE}"]
    finally:
        thread.close()
    return []


@dataclass
class _Trial:
    """One demonstration, whose turns are played in the run's environment."""

    config: RunConfig
    tokenizer: PolicyTokenizer
    demonstrated: DemonstratedEpisodes
    prompt: Prompt
    question: Question
    _too_long: bool = False  # True if the environment allows fewer tokens than a turn has
    _asked: int = 0  # number of turns that the environment has asked for

    def find_fault(self, thread: EnvironmentThread) -> str:
        """Return how the episode differs from the demonstration, or ""."""
        expected = self.demonstrated(self.prompt, self.question)
        try:
            return thread.run(asyncio.wait_for(self._play(thread, expected), SECONDS), SECONDS + MARGIN)
        except TimeoutError:
            return f"its episode did not end within {SECONDS:g} s"

    async def _play(self, thread: EnvironmentThread, expected: Sequence[Demonstration]) -> str:
        """Play the episode, and return how it differs from the demonstration, or "" if it does not differ."""
        room, ports, turns = self.config.engine.max_new_tokens, build_ports(self.config, self.tokenizer), self._count
        episode = PlayedEpisode(self.prompt, room, self._say, want_every, accept_every, ports=ports)
        score = await episode.play(thread.environment)
        played = episode.trajectories(DONE) if episode.first is not None else ()
        for one, found in zip(expected, played, strict=False):
            if difference := self._find_difference(one, found.tokens):
                return difference
        reason = f" ({score.reason})" if score is not None and score.reason else ""
        if self._too_long:
            return f"its turn {self._asked} is longer than the environment allows"
        if episode.turns < turns:
            return f"its episode ends after {episode.turns} of {turns} turns{reason}"
        if score is not None and self._asked <= turns and not _is_rewarded(score, played):
            return f"its episode gets the reward {score.value:g}{reason}"
        return ""

    @property
    def _count(self) -> int:
        return len(self.question.turns)

    async def _say(self, turn: Turn) -> VersionedGeneration | None:
        """Answer a turn as the demonstration does; return None after its last turn."""
        self._asked = turn.number + 1
        if turn.number >= self._count:
            return None
        said = self.demonstrated.say(turn, self.question.turns[turn.number])
        self._too_long = said is None
        return said

    def _find_difference(self, one: Demonstration, found: Sequence[int]) -> str:
        """Compare the contexts up to the last token of the policy; return the first difference, or ""."""
        expected, sampled = [*one.prompt, *one.response], one.sampled or [True] * len(one.response)
        end = len(one.prompt) + max((place + 1 for place, mine in enumerate(sampled) if mine), default=0)
        pairs = zip(expected[:end], found, strict=False)
        place = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if place is None:
            return ""
        ours, theirs = (self.tokenizer.decode([*part[place : place + SHOWN]]) for part in (expected, found))
        return f"its tokens from number {place} on are {ours!r}, but those of the episode {theirs!r}"


def _is_rewarded(score: Score, played: Sequence[Trajectory]) -> bool:
    """Return whether an episode, one of its roles or one of its turns has a reward above 0, or its outcome is good."""
    turns = (value for one in played for value in one.token_rewards or ())
    good = score.outcome in (Outcome.CORRECT, Outcome.PARTIAL)
    return good or any(value > 0 for value in (score.value, *score.roles.values(), *turns))
