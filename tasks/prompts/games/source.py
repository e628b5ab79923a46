"""Generates boards as prompts: maps of FrozenLake, or rooms of Sokoban.

Breadth-first search makes sure that each board has a solution of at most `moves` moves. A board depends only on the
seed, the stream (training, demonstrations or held-out) and the position. The text of a board is its key, so no held-out
board is trained on or demonstrated. A demonstration is an episode with one of the shortest solutions.
"""

from __future__ import annotations

import random

from rollflow.storage.errors import ConfigError
from rollflow.tasks.games import describe_board
from rollflow.tasks.games.frozen_lake import FrozenLake
from rollflow.tasks.games.grid import Board, find_solution
from rollflow.tasks.games.sokoban import Sokoban
from rollflow.tasks.prompts.base import DemonstratedTurn, Question
from rollflow.tasks.prompts.games.config import FrozenLakePrompts, SokobanPrompts
from rollflow.tasks.prompts.held_out import HeldOut

TRIES = 10_000  # largest number of boards to draw for a position; if none is suitable, the run fails


class GameSource:
    """A `QuestionSource` of boards."""

    def __init__(self, config: FrozenLakePrompts | SokobanPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        self._config, self._seed, self._excluded = config, seed, excluded
        self._held: dict[str, Question] = {}
        for position in range(count * 20):
            if len(self._held) == count:
                break
            question = self._draw_question(self._create_generator("held out", position))
            self._held.setdefault(question.key, question)
        for question in self._held.values():
            excluded.add(question)

    def training(self, position: int) -> Question:
        """Return the board at `position` of the training boards."""
        return self._find_allowed("training", position)

    def demonstration(self, position: int) -> Question:
        """Return the board at `position` of the demonstrations, with the turns of an episode."""
        return self._find_allowed("demonstration", position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out boards."""
        return list(self._held.values())[:count]

    def _create_generator(self, stream: str, position: int) -> random.Random:
        return random.Random(f"{self._seed}:{stream}:{position}")

    def _find_allowed(self, stream: str, position: int) -> Question:
        draw = self._create_generator(stream, position)
        for _ in range(TRIES):
            question = self._draw_question(draw)
            if question not in self._excluded:
                return question
        raise ConfigError(
            f"evaluation.prompts: {len(self._held)} boards are held out, and no other board of "
            f"{self._config.kind} is left to train on; lower evaluation.prompts, or raise prompts.size"
        )

    def _draw_question(self, draw: random.Random) -> Question:
        """Draw boards until one has a solution, and build its question."""
        for _ in range(TRIES):
            board = _draw_board(self._config, draw)
            if board is not None and (solution := find_solution(board, self._config.moves, draw)):
                return build_question(self._config.kind, board, solution)
        raise ConfigError(
            f"prompts.size = {self._config.size}: none of {TRIES} boards of {self._config.kind} can be solved in "
            f"{self._config.moves} moves or fewer; raise prompts.size or prompts.moves"
        )


def _draw_board(config: FrozenLakePrompts | SokobanPrompts, draw: random.Random) -> Board | None:
    if isinstance(config, FrozenLakePrompts):
        return FrozenLake.draw(draw, config.size, config.holes)
    return Sokoban.draw(draw, config.size, config.walls, config.boxes)


def build_question(kind: str, board: Board, solution: str) -> Question:
    """Build the question of a board, with the turns of the episode that follows `solution`."""
    text, state, turns = board.write(), board.start, list[DemonstratedTurn]()
    for move in solution:
        state = board.play(state, move)
        turns.append(DemonstratedTurn(move, ({"role": "user", "content": board.write_state(state)},)))
    turns[-1] = DemonstratedTurn(solution[-1])
    return Question(text, solution, describe_board(kind, board, solution), f"{kind} {text}", turns=tuple(turns))
