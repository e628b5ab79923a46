"""An environment: the policy answers, reads a hint, and answers again; the second answer counts."""

from __future__ import annotations

from collections.abc import Sequence

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.scorers.base import Score


class SecondThought(Environment):
    """`hint` is put behind the first answer, as tokens: nothing is trained on them."""

    def __init__(self, hint: Sequence[int]) -> None:
        self._hint = tuple(hint)

    async def play(self, episode: Episode) -> Score | None:
        """See `Environment`."""
        made = await episode.generate()
        if made is None:
            return None
        if len(self._hint) < episode.room:  # else there is no room for another answer
            episode.add(self._hint)
            made = await episode.generate()
        return None if made is None else await episode.judge(made.tokens)
