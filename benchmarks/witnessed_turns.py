"""Defines an environment that writes turns and actions to files outside of the run, for `benchmarks.turn_kills`.

The file `turns` has a line for each turn that the environment got: the name of the turn, the number of its tokens, and
1 if the turn was generated before a crash. The file `actions` has a line for each action that was done.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.scorers.base import Score

STATES = 9973


class WitnessedTurns(Environment):
    """An environment that does one action for each of `turns` turns. If `saves` is true, it stores a snapshot after
    each turn.

    For a turn that was generated before a crash, the environment first looks up whether it has already done the action.
    """

    def __init__(self, folder: str, turns: int = 6, seconds: float = 0.1, saves: bool = True) -> None:
        self._folder, self._turns, self._seconds, self._saves = Path(folder), turns, seconds, saves

    async def play(self, episode: Episode) -> Score | None:
        """Play all turns; the reward is 1 if the last state is odd."""
        state, turn = episode.seed % STATES, 0
        if episode.snapshot is not None:
            state, turn = map(int, episode.snapshot.split())
        while (made := await episode.generate(max_tokens=6)) is not None:
            turn += 1
            if episode.id:  # an episode of an evaluation has no name
                self._witness(episode, len(made.tokens))
            await asyncio.sleep(self._seconds)
            state = (state * 31 + sum(made.tokens)) % STATES
            if turn == self._turns or episode.room < 2:
                return Score(float(state % 2))
            episode.enter_state(str(state))
            episode.add(made.tokens[:1])
            if self._saves:
                episode.save_snapshot(f"{state} {turn}".encode())
        return None

    def _witness(self, episode: Episode, tokens: int) -> None:
        """Write the newest turn to the file, and do its action unless it was done before."""
        name = episode.turn_id
        self._write("turns", f"{name} {tokens} {int(episode.is_recalled)}\n")
        if not (episode.is_recalled and self._has_done(name)):
            self._write("actions", f"{name}\n")

    def _has_done(self, name: str) -> bool:
        return f"\n{name}\n" in "\n" + (self._folder / "actions").read_text()

    def _write(self, file: str, line: str) -> None:
        """Append a line at once, so that it survives the death of this process."""
        opened = os.open(self._folder / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(opened, line.encode())
        finally:
            os.close(opened)
