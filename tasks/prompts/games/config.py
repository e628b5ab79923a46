"""The `[[prompts]]` sections of games. An environment of the same kind plays the boards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from rollflow.tasks.prompts.section import PromptBase
from rollflow.tasks.runtime.sections import Section


class GamePrompts(PromptBase):
    """Config keys of all games."""

    moves: int = Field(
        10,
        ge=1,
        le=100,
        description="largest number of moves of a board's shortest solution; longer boards are left out",
    )


class FrozenLakePrompts(GamePrompts):
    """Maps of FrozenLake, each with a path to the goal."""

    kind: Literal["frozen-lake"] = Field(
        "frozen-lake", description='random maps of FrozenLake; they need [environment] kind = "frozen-lake"'
    )
    size: int = Field(4, ge=2, le=6, description="number of cells in each row and column of a map")
    holes: float = Field(
        0.2, ge=0, lt=1, description="probability that a cell of a map is a hole; start and goal are never holes"
    )

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.kind


class SokobanPrompts(GamePrompts):
    """Rooms of Sokoban, each with a solution."""

    kind: Literal["sokoban"] = Field(
        "sokoban", description='random rooms of Sokoban; they need [environment] kind = "sokoban"'
    )
    size: int = Field(
        6, ge=5, le=8, description="number of cells in each row and column of a room, with the wall around the room"
    )
    walls: float = Field(0.15, ge=0, le=0.5, description="probability that a cell inside of a room is a wall")
    boxes: int = Field(1, ge=1, le=3, description="number of boxes in a room, and of goals for them")

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.kind


GAMES = ("frozen-lake", "sokoban")  # kinds of environments that play the boards


def find_game_faults(sources: Sequence[PromptBase], environment: Section) -> Iterator[tuple[str, object, str]]:
    """Yield the config key, the value and the fix for each prompt source and environment that do not play the same
    game."""
    kind, turns = str(getattr(environment, "kind", "")), getattr(environment, "max_turns", None)
    for which, source in enumerate(sources):
        asked = str(getattr(source, "kind", ""))
        if isinstance(source, GamePrompts) and asked != kind:
            yield f"prompts.{which}.kind", asked, f'its boards need an environment; set environment.kind = "{asked}"'
        elif not isinstance(source, GamePrompts) and kind in GAMES:
            cure = f'it plays only boards of its game; set prompts.kind = "{kind}", or choose another environment'
            yield "environment.kind", kind, cure
        elif isinstance(source, GamePrompts) and turns is not None and source.moves > turns:
            cure = f"no episode has more than environment.max_turns = {turns} moves; lower it, or raise that key"
            yield f"prompts.{which}.moves", source.moves, cure
