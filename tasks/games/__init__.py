"""Defines two games on a square grid, FrozenLake and Sokoban, and the prompt references that describe their boards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollflow.tasks.games.frozen_lake import FrozenLake
from rollflow.tasks.games.grid import Board
from rollflow.tasks.games.sokoban import Sokoban

BOARDS: dict[str, type[Board]] = {"frozen-lake": FrozenLake, "sokoban": Sokoban}


def describe_board(kind: str, board: Board, solution: str) -> Mapping[str, Any]:
    """Return a prompt reference that describes a board, so that `read_board` can read the board."""
    return {"answer": solution, "game": kind, "size": board.size, "board": board.write()}


def read_board(reference: Mapping[str, Any]) -> Board:
    """Return the board that a prompt's reference describes."""
    return BOARDS[reference["game"]].read(reference["size"], reference["board"])
