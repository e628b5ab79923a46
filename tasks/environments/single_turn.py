"""The environment with one response per prompt, which the prompt's scorer scores."""

from __future__ import annotations

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.scorers.base import Score


class SingleTurn(Environment):
    """Runs episodes of a single turn."""

    async def play(self, episode: Episode) -> Score | None:
        """Generate one response and score it."""
        generation = await episode.generate()
        return None if generation is None else await episode.judge(generation.tokens)


SINGLE_TURN = SingleTurn()
