"""Defines the environment with one response per prompt, which the prompt's scorer scores."""

from __future__ import annotations

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.scorers.base import Score


class SingleTurn(Environment):
    """An environment in which an episode is one prompt and one response."""

    has_turns = False
    asks_at_once = True

    async def play(self, episode: Episode) -> Score | None:
        """Generate one response to the prompt, and score the response."""
        generation = await episode.generate()
        return None if generation is None else await episode.judge(generation.tokens)


SINGLE_TURN = SingleTurn()
