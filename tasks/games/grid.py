"""Defines boards of games on a square grid: their cells, moves, texts and shortest solutions.

The cells are numbered row by row from the upper left, and each cell is written as one letter or digit. The text of a
board needs few tokens, and each cell has the same token in every board:

    k/bf:a        goals / holes or walls : what moves, with the player last

On a grid of size 4, the cells are:

    a b c d
    e f g h
    i j k l
    m n o p

A state is a tuple of cells: the boxes in ascending order, then the player.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

CELLS = "abcdefghijklmnopqrstuvwxyz0123456789"
MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}  # letter -> change of row and column
LAYOUT = re.compile(r"([a-z0-9]+)/([a-z0-9]*):([a-z0-9]+)")

State = tuple[int, ...]


class GameEnd(StrEnum):
    """How a game ended."""

    GOAL = "goal"
    HOLE = "hole"


@dataclass(frozen=True, slots=True)
class Board(ABC):
    """The fixed parts of a board, and the state at the start; a subclass defines the rules of a game."""

    size: int  # cells per row
    goals: frozenset[int]
    marked: frozenset[int]  # holes of a lake, or inner walls of a room
    start: State

    @abstractmethod
    def play(self, state: State, move: str) -> State:
        """Return the state after a move, which is one of the letters U, D, L and R. A move that is not possible changes
        nothing.
        """

    @abstractmethod
    def find_end(self, state: State) -> GameEnd | None:
        """Return how the game has ended in this state, or None if the game continues."""

    def bound_moves(self, state: State) -> int:
        """Return a lower bound of the number of moves to the goal. A search skips states whose bound is too large."""
        return 0

    def write(self) -> str:
        """Return the text of the board at the start of the game."""
        return f"{write_cells(self.goals)}/{write_cells(self.marked)}:{self.write_state(self.start)}"

    def write_state(self, state: State) -> str:
        """Return the text of the cells that moves can change, with the player last."""
        return "".join(CELLS[cell] for cell in state)

    @classmethod
    def read(cls, size: int, text: str) -> Self:
        """Return the board that `write` wrote.

        Raises:
            ValueError: the text describes no board of this size.
        """
        found = LAYOUT.fullmatch(text)
        goals, marked, start = (
            ([CELLS.index(one) for one in part] for part in found.groups()) if found else ([], [], [])
        )
        if not found or max((*goals, *marked, *start)) >= size * size:
            raise ValueError(f"{text!r} does not describe a board of size {size}")
        return cls(size, frozenset(goals), frozenset(marked), tuple(start))

    def measure_distance(self, one: int, other: int) -> int:
        """Return the number of steps between two cells on a grid without walls."""
        (row, column), (to_row, to_column) = divmod(one, self.size), divmod(other, self.size)
        return abs(row - to_row) + abs(column - to_column)

    def step(self, cell: int, move: str) -> int:
        """Return the cell next to `cell`, or `cell` itself at the edge of the grid."""
        row, column = divmod(cell, self.size)
        down, right = MOVES[move]
        row, column = row + down, column + right
        return row * self.size + column if 0 <= row < self.size and 0 <= column < self.size else cell


def write_cells(cells: frozenset[int]) -> str:
    """Return the text of cells in ascending order."""
    return "".join(CELLS[cell] for cell in sorted(cells))


def find_solution(board: Board, longest: int, draw: random.Random | None = None) -> str | None:
    """Return a shortest sequence of moves to the goal, or None if each solution has more than `longest` moves.

    Breadth-first search skips states from which the goal cannot be reached within `longest` moves. With `draw`, one of
    the shortest solutions is chosen at random.
    """
    if board.bound_moves(board.start) > longest:
        return None
    came: dict[State, tuple[State, str] | None] = {board.start: None}
    waiting, moves = deque([(board.start, 0)]), list(MOVES)
    while waiting:
        state, depth = waiting.popleft()
        if depth == longest:
            return None
        if draw is not None:
            draw.shuffle(moves)
        for move in moves:
            after = board.play(state, move)
            if after in came:
                continue
            came[after], end = (state, move), board.find_end(after)
            if end is GameEnd.GOAL:
                return _trace_moves(came, after)
            if end is None and depth + 1 + board.bound_moves(after) <= longest:
                waiting.append((after, depth + 1))
    return None


def _trace_moves(came: dict[State, tuple[State, str] | None], state: State) -> str:
    """Return the moves from the start to a state, from the states and moves that led to each visited state."""
    found = ""
    while (step := came[state]) is not None:
        state, move = step
        found = move + found
    return found
