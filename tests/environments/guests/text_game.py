"""A game of TextWorld, with gymnasium's signature: the policy writes a command, and reads what the game answers."""

from __future__ import annotations

import textworld


class TextGame:
    """Plays a game file. TextWorld returns the score so far; the reward of a step is the increase of the score."""

    def __init__(self, game: str) -> None:
        self._game = textworld.start(game)
        self._score = 0

    def reset(self, seed=None) -> tuple:
        self._score = 0
        return self._game.reset().feedback.strip(), {}

    def step(self, command: str) -> tuple:
        state, score, done = self._game.step(command)
        reward, self._score = score - self._score, score
        return state.feedback.strip(), reward, done, False, {}

    def close(self) -> None:
        self._game.close()


def read_command(said: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        raise ValueError("write a command, such as: look")
    return lines[-1]
