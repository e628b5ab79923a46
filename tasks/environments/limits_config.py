"""Defines config keys that several kinds of environments share: limits of episodes, and limits of processes and
tools."""

from __future__ import annotations

from pydantic import Field

from rollflow.tasks.environments.limits import EpisodeLimits
from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

LARGEST_PENALTY = 1e9  # a reward must fit into a float32
MOST_EPISODES = 10_000


class LimitedEnvironment(Section):
    """Base class of the configs of environments whose episodes may have several turns. Each kind of environment may
    change the defaults of these keys."""

    max_turns: int | None = Field(
        None,
        gt=0,
        description="largest number of turns of an episode; default: only engine.max_new_tokens limits the episode",
    )
    max_turn_tokens: int | None = Field(
        None, gt=0, description="largest number of tokens that the policy generates in one turn; default: no limit"
    )
    max_episode_tokens: int | None = Field(
        None,
        gt=0,
        description="largest number of tokens that the policy generates in an episode, in all branches; default: no "
        "limit",
    )
    setup_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds for which the environment may compute before the first generation; default: turn_seconds",
    )
    turn_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds for which the environment may compute in one turn, after the generation; default: no "
        "limit",
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds for which the environment may compute in an episode, setup included; waits for the policy "
        "and the scorer do not count; after a crash of the run, the time is counted from 0 again; default: no limit",
    )
    unparsable_penalty: float = Field(
        0.0,
        ge=0,
        le=LARGEST_PENALTY,
        description="number that is subtracted from the reward of a turn whose action cannot be read",
    )

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of an episode."""
        return EpisodeLimits(
            self.max_turns,
            self.max_turn_tokens,
            self.max_episode_tokens,
            self.setup_seconds,
            self.turn_seconds,
            self.episode_seconds,
            self.unparsable_penalty,
        )


class ParallelEnvironment(Section):
    """Base class of the configs of environments in which each episode has its own processes or tools."""

    at_once: int = Field(
        64,
        gt=0,
        le=MOST_EPISODES,
        description="largest number of episodes that run at the same time, each with its own processes; further "
        "episodes wait in order of arrival",
    )
    max_failures: int = Field(
        20,
        gt=0,
        description="the run fails if this number of episodes in a row fail for reasons that the policy cannot have "
        "caused",
    )

    @property
    def most_episodes(self) -> int:
        """The largest number of episodes that run at the same time."""
        return self.at_once
