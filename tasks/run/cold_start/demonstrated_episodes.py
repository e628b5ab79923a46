"""Plays the demonstrations of a cold start as episodes, so that their tokens equal the tokens of the run's episodes.

    turns of a demonstration --> PlayedEpisode --> trajectory --> the tokens that the policy is trained on

The prompt source gives the text of each turn and each reply; the code that plays episodes converts these texts into
tokens. An environment of TRL or gymnasium plays the demonstration itself, so its replies are those of an episode.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome, Prompt, StopReason
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.engines.stop_strings import StopWatch
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import MixedEnvironment, ToolsEnvironment
from rollflow.tasks.environments.foreign.config import ForeignEnvironment
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.limits import NO_LIMITS
from rollflow.tasks.environments.tool_calls import Action
from rollflow.tasks.environments.tool_use.check import list_schemas
from rollflow.tasks.environments.tool_use.offered import make_readable
from rollflow.tasks.environments.tool_use.play import converse
from rollflow.tasks.policies.demonstrations import Demonstration, DemonstrationPool
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import DemonstratedTurn, Question
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run.cold_start.environment_thread import EnvironmentThread
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.scorers.base import Score, ScoreRequest

DONE = Score(1.0)


def open_pool(config: RunConfig, prompts: RunPrompts, tokenizer: PolicyTokenizer) -> DemonstrationPool:
    """Return the pool of a run's demonstrations; the caller must close the pool.

    Raises:
        ConfigError: a tool cannot be started or imported.
    """
    draw, encode = random.Random(f"{config.seed}:cold start"), DemonstratedEpisodes(config, tokenizer)
    return DemonstrationPool(prompts, encode, draw, encode.close)


class DemonstratedEpisodes:
    """Converts a question with its example answer into demonstrations."""

    def __init__(self, config: RunConfig, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer, self._context = tokenizer, config.engine.limit_context(tokenizer.context)
        self._ports = replace(build_ports(config, tokenizer), limits=NO_LIMITS)
        self._tools = config.environment if isinstance(config.environment, ToolsEnvironment) else None
        self._schemas = list_schemas(self._tools) if self._tools is not None else []
        foreign = isinstance(config.environment, ForeignEnvironment | MixedEnvironment)
        self._thread = EnvironmentThread(config.environment) if foreign else None

    def close(self) -> None:
        """End the processes of the environment."""
        if self._thread is not None:
            self._thread.close()

    def __call__(self, prompt: Prompt, question: Question) -> list[Demonstration]:
        """Return the demonstrations of a question, one for each branch of its episode.

        Raises: ConfigError: the turns do not fit the environment, or are too long for the context.
        """
        if question.turns or self._tools is not None or self._thread is not None:
            turns = question.turns or (DemonstratedTurn(question.answer, ends=True),)
            if self._thread is not None:
                return self._thread.run(self._play(prompt, question, turns, self._thread.environment))
            environment = _GivenReplies(turns) if self._tools is None else self._give_results(turns)
            return asyncio.run(self._play(prompt, question, turns, environment))
        response = [*self._tokenizer.encode_response(question.answer), self._tokenizer.stop_tokens[0]]
        return [Demonstration(prompt.tokens, response)]

    async def _play(
        self, prompt: Prompt, question: Question, turns: Sequence[DemonstratedTurn], environment: Environment
    ) -> list[Demonstration]:
        async def ask(turn: Turn) -> VersionedGeneration | None:
            return self.say(turn, turns[turn.number]) if turn.number < len(turns) else None

        room = self._context - prompt.input.length
        episode, why = PlayedEpisode(prompt, room, ask, want_every, accept_every, ports=self._ports), ""
        try:
            score = await episode.play(environment)
            if score is not None and (_is_broken(score) or (score.reason and episode.turns < len(turns))):
                why = f" ({score.reason})"
        except (WorldEnded, ValueError) as error:
            why = f" ({error})"
        if episode.turns < len(turns) or why:
            cure = "let only the last turn answer" if self._thread is None else "correct its turns"
            ended = f"ends after {episode.turns} of {len(turns)} turns{why}"
            cure = f"{cure}, or raise policy.cold_start.context"
            raise ConfigError(f"prompts: the demonstration of the question {question.text!r} {ended}; {cure}")
        given, played = episode.prompt.input.length, episode.trajectories(DONE)
        return [Demonstration([*one.tokens[:given]], [*one.tokens[given:]], [*one.loss_mask[given:]]) for one in played]

    def say(self, asked: Turn, turn: DemonstratedTurn) -> VersionedGeneration | None:
        """Return the demonstrated answer of a turn, up to a stop string; None if the answer is longer than allowed."""
        tokenizer = self._tokenizer
        tokens = [*tokenizer.encode_response(turn.said), *tokenizer.stop_tokens[: int(turn.ends)]]
        tokens = tokens[: StopWatch(asked.stop, tokenizer.decode).find_end(tokens)]
        if len(tokens) > asked.max_new_tokens:
            return None
        span = TokenSpan.of(tokens, [0.0] * len(tokens), [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    def _give_results(self, turns: Sequence[DemonstratedTurn]) -> Environment:
        """Build an environment `tools` whose tools return the replies of a demonstration."""
        assert self._tools is not None
        most = self._tools.result_characters
        texts = [[reply["content"] for reply in turn.replies] for turn in turns]
        return _GivenResults(self._schemas, [[make_readable(one, most) for one in some] for some in texts])


@dataclass
class _GivenReplies(Environment):
    """An environment that adds the messages of a demonstration after each of its turns."""

    turns: Sequence[DemonstratedTurn]

    async def play(self, episode: Episode) -> Score | None:
        for turn in self.turns:
            if await episode.generate() is None or (turn.replies and not episode.extend(turn.replies)):
                break
        return DONE


@dataclass
class _GivenResults(Environment):
    """The environment `tools` with given results; no tool is run."""

    schemas: Sequence[Mapping[str, Any]]
    results: Sequence[Sequence[str]]  # results of the tools in each turn

    async def play(self, episode: Episode) -> Score | None:
        results = iter(self.results)

        async def act(_: Action) -> Sequence[str]:
            return next(results, ())

        await converse(episode, self.schemas, act)
        return DONE


async def want_every(_: PlayedEpisode) -> bool:
    """Return True, because each demonstration is kept."""
    return True


async def accept_every(_: ScoreRequest) -> Score:
    """Return a score, because an environment may have the last response of a demonstration scored."""
    return DONE


def _is_broken(score: Score) -> bool:
    """Return whether an episode ended because its environment failed."""
    return score.failed or score.outcome is Outcome.UNJUDGED
