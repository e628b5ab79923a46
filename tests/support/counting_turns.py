"""An environment whose actions change something outside of the run: each action is a line of a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.scorers.base import Score

TURNS = 4


class CountingTurns(Environment):
    """An environment that acts once for each turn. Each line of the file `path` has an episode's id, the number of a
    turn, and its tokens.

    A recalled turn is looked up in the file first, because its action may have been done before a crash.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def play(self, episode: Episode) -> Score | None:
        """Play `TURNS` turns; the reward is 1 if the last turn begins with an odd token."""
        for turn in range(TURNS):
            generation = await episode.generate(max_tokens=3)
            if generation is None:
                return None
            line = f"{episode.id} {turn} {','.join(map(str, generation.tokens))}\n"
            if not episode.is_recalled or line not in self._path.read_text():
                self._act(line)
            await asyncio.sleep(0.05)
            if turn < TURNS - 1:
                episode.add(generation.tokens[:1])
        return Score(float(generation.tokens[0] % 2))

    def _act(self, line: str) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)
