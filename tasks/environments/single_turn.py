"""A prompt, one response, the verifier's reward."""

from __future__ import annotations

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.verifiers.base import Score


class SingleTurn(Environment):
    """See the module's docstring."""

    async def play(self, episode: Episode) -> Score | None:
        """See `Environment`."""
        made = await episode.generate()
        return None if made is None else await episode.judge(made.tokens)


SINGLE_TURN = SingleTurn()
