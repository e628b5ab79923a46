"""Environments in which the policy answers, reads a hint or a tool's result, and answers again. Only the last answer is
scored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.scorers.base import Score


class SecondThought(Environment):
    """An environment that adds `hint` after the first answer, as tokens on which the policy is not trained."""

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


class AskTool(Environment):
    """An environment in which the policy may call the tool `count` by `<a:banana>`, reads its result, and answers."""

    CALL = re.compile(r"<(\w):(\w+)>$")

    def __init__(self, budget: int = 16) -> None:
        self._budget = budget  # most tokens of the first turn

    async def play(self, episode: Episode) -> Score | None:
        """See `Environment`."""
        made = await episode.generate(stop=(">",), max_tokens=self._budget)  # the ">" stays in the response
        if made is None:
            return None
        ports = episode.ports
        if call := self.CALL.search(ports.tokenizer.decode_response(made.tokens)):
            result = await ports.tools.call("count", {"letter": call[1], "word": call[2]})
            message = {"role": "tool", "content": result.text}
            tokens = ports.renderer.render(episode.prompt, episode.response, [message])
            if len(tokens) < episode.room:  # else there is no room for an answer
                episode.add(tokens)
                made = await episode.generate()
        return None if made is None else await episode.judge(made.tokens)
