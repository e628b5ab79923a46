"""FrozenLake without slipping: the player walks over a frozen lake to the goal, and must not step into a hole."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from rollflow.tasks.games.grid import Board, GameEnd, State


@dataclass(frozen=True, slots=True)
class FrozenLake(Board):
    """A lake with holes, whose state is the player's cell."""

    def play(self, state: State, move: str) -> State:
        """Return the state after a move. A move over the edge of the lake changes nothing."""
        return (self.step(state[-1], move),)

    def find_end(self, state: State) -> GameEnd | None:
        """Return whether the game has ended because the player is at the goal or in a hole."""
        if state[-1] in self.goals:
            return GameEnd.GOAL
        return GameEnd.HOLE if state[-1] in self.marked else None

    @classmethod
    def draw(cls, draw: random.Random, size: int, holes: float) -> Self:
        """Draw a lake at random, which may have no path to the goal. Each cell except start and goal is a hole with
        probability `holes`.
        """
        cells = range(size * size)
        start, goal = draw.sample(cells, 2)
        drowned = frozenset(cell for cell in cells if cell not in (start, goal) and draw.random() < holes)
        return cls(size, frozenset((goal,)), drowned, (start,))
