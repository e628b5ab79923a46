"""Replays a stored episode in a new worker process of its environment, to render a frame after each turn.

    stored tokens --> turn --> environment --> frame
         |                         |
         +---- same context? <-----+    a different context ends the replay

The environment begins with the prompt's row and seed, and gets the recorded responses instead of new ones. Before each
turn, the context that the environment has built must have exactly the recorded tokens. Otherwise the replay ends, and
the frames of this context are dropped. Nothing is written to the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollflow.flows.views.turns import split_turns
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import GroupKey, Outcome, StopReason, Trajectory
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments import build_environment, close_environment
from rollflow.tasks.environments.foreign.check import run_apart
from rollflow.tasks.environments.foreign.frames import FrameTaker
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.scorers.base import Score, ScoreRequest

REPLAY_SECONDS = 120.0  # longest time in seconds of a replay
CHANGED = "the replay differs from the recorded episode: the environment is not deterministic, or it has changed"


@dataclass
class RecordedTurns:
    """Answers the turns of an episode with its recorded tokens, as long as each context equals the recorded context."""

    turns: Sequence[tuple[Int32s, Int32s]]  # context and response of each turn
    taker: FrameTaker
    is_judged: bool = False  # True once the environment has asked for the verdict of a scorer

    async def ask(self, turn: Turn) -> VersionedGeneration | None:
        """Return the recorded response to a turn; None at the end of the replay."""
        if self.taker.reason:
            return None
        if turn.number >= len(self.turns):
            self.drop(turn.number, f"it goes on after turn {turn.number}")
            return None
        context, tokens = self.turns[turn.number]
        if turn.prompt.flat != context:
            self.drop(turn.number, f"turn {turn.number + 1} begins with another text")
            return None
        nothing = [0.0] * len(tokens)
        span = TokenSpan.of(tokens, nothing, [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def keep(self, _: PlayedEpisode) -> bool:
        """Return True, so that the replay is scored."""
        return True

    async def judge(self, _: ScoreRequest) -> Score:
        """Return no verdict, because a replay is not judged again."""
        self.is_judged = True
        return Score(0.0)

    def check_end(self, score: Score | None, recorded: Trajectory, turns: int) -> None:
        """Compare the end of the replay with the recorded episode. If the replay ended early or with another reward,
        drop its last frames and note the reason.
        """
        if self.taker.reason:
            return
        if score and score.outcome is Outcome.UNJUDGED:
            self.taker.reason = score.reason
        elif turns < len(self.turns):
            why = score.reason if score else "the environment ended the episode"
            self.drop(turns, f"it ended after turn {turns} of {len(self.turns)}: {why}")
        elif (
            score
            and not (self.is_judged or recorded.left_out)
            and np.float32(score.value) != np.float32(recorded.reward)
        ):
            self.drop(turns, f"its reward is {score.value:g} instead of {recorded.reward:g}")

    def drop(self, turn: int, why: str) -> None:
        """Remove the frames after turn number `turn`, and note the reason."""
        self.taker.frames = [frame for frame in self.taker.frames if frame.turn < turn]
        self.taker.reason = f"{CHANGED} ({why})"


def replay_frames(
    context: RunContext, key: GroupKey, trajectories: Sequence[Trajectory], taker: FrameTaker, seconds: float
) -> FrameTaker:
    """Replay the episode that has these trajectories, for at most `seconds`, and return the frames of the episode.

    Raises:
        ConfigError: the environment is of a kind without frames, or the run's prompts have changed.
        Corrupt: the run's prompts cannot be read.
    """
    return run_apart(_replay(context, key, trajectories, taker, seconds))


async def _replay(
    context: RunContext, key: GroupKey, trajectories: Sequence[Trajectory], taker: FrameTaker, seconds: float
) -> FrameTaker:
    config, prompt = context.config_at(trajectories[0].started_version + 1), context.prompts().prompt(key.prompt)
    environment = build_environment(config.environment)
    if not taker.attach(environment, prompt):
        kinds = 'only environments of kind = "trl" and "gymnasium" have frames'
        raise ConfigError(f"environment.kind = {config.environment.kind!r}: {kinds}; leave out --frames")
    recorded = RecordedTurns(list(_list_turns(trajectories)), taker)
    ports, longest = build_ports(config, context.tokenizer), config.engine.max_new_tokens
    episode = PlayedEpisode(prompt, longest, recorded.ask, recorded.keep, recorded.judge, ports=ports)
    try:
        async with asyncio.timeout(seconds):
            score = await episode.play(environment)
        recorded.check_end(score, trajectories[0], episode.turns)
    except TimeoutError:
        taker.reason = f"the replay took more than {seconds:g} s"
    finally:
        await close_environment(environment)
    return taker


def _list_turns(trajectories: Sequence[Trajectory]) -> Iterator[tuple[Int32s, Int32s]]:
    """Return the context and the response of each turn of an episode."""
    parts = ((one, part) for one in trajectories for part in split_turns(one) if part.author == "policy")
    return ((Int32s.of(one.tokens[: part.start]), Int32s.of(part.tokens)) for one, part in parts)
