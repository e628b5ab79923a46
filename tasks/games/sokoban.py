"""Sokoban: the player pushes boxes onto goals, one box at a time, and cannot pull a box."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import permutations
from typing import Self

from rollflow.tasks.games.grid import Board, GameEnd, State


@dataclass(frozen=True, slots=True)
class Sokoban(Board):
    """The inside of a room of boxes and goals, without the wall around the room. The state is the cells of the boxes in
    ascending order, then the player's cell.
    """

    def play(self, state: State, move: str) -> State:
        """Return the state after a move. A move against a wall, or against a box that cannot be pushed, changes
        nothing.
        """
        *boxes, player = state
        cell = self.step(player, move)
        if cell == player or cell in self.marked:
            return state
        if cell not in boxes:
            return (*boxes, cell)
        pushed = self.step(cell, move)
        if pushed == cell or pushed in self.marked or pushed in boxes:
            return state
        return (*sorted(pushed if box == cell else box for box in boxes), cell)

    def find_end(self, state: State) -> GameEnd | None:
        """Return whether each box stands on a goal."""
        return GameEnd.GOAL if self.goals == frozenset(state[:-1]) else None

    def bound_moves(self, state: State) -> int:
        """Return a lower bound, as `Board` specifies: the player walks to a box, and each box is pushed to a goal of
        its own.

        A room with one box has few states, so its search needs no bound. Without a bound, such rooms are the same as in
        earlier recorded runs.
        """
        *boxes, player = state
        if len(boxes) == 1:
            return 0
        pushes = min(sum(map(self.measure_distance, boxes, goals)) for goals in permutations(self.goals))
        return pushes + min(self.measure_distance(player, box) for box in boxes) - 1 if pushes else 0

    @classmethod
    def draw(cls, draw: random.Random, size: int, walls: float, boxes: int) -> Self | None:
        """Draw a room at random, which may have no solution; return None if the room is too small for its boxes. Each
        inner cell is a wall with probability `walls`. `size` includes the wall around the room.
        """
        inner = size - 2
        marked = frozenset(cell for cell in range(inner * inner) if draw.random() < walls)
        free = [cell for cell in range(inner * inner) if cell not in marked]
        if len(free) < 2 * boxes + 2:
            return None
        placed = draw.sample(free, 2 * boxes + 1)
        goals, moving, player = placed[:boxes], sorted(placed[boxes:-1]), placed[-1]
        return cls(inner, frozenset(goals), marked, (*moving, player))
