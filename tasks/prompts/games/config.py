"""Defines the `[[prompts]]` sections of games and of seeds. The policy plays a game in an environment of the same kind.
From seeds, any environment may make its tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.prompts.section import PromptBase
from rollflow.tasks.runtime.sections import Section, refuse

SEED = "{seed}"  # the placeholder in a question that the seed replaces
GAMES = ("frozen-lake", "sokoban", "kuhn-poker")


class GamePrompts(PromptBase):
    """Config keys of all games with boards."""

    moves: int = Field(
        10,
        ge=1,
        le=100,
        description="largest number of moves of a board's shortest solution; boards that need more moves are left out",
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
    boxes: int = Field(1, ge=1, le=3, description="number of boxes in a room, which is also the number of goals")

    @property
    def is_slow(self) -> bool:
        """True if finding a prompt may take long, because rooms with several boxes are drawn until one has a
        solution."""
        return self.boxes > 1

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.kind


class KuhnPokerPrompts(PromptBase):
    """Deals of Kuhn poker; six different deals exist."""

    kind: Literal["kuhn-poker"] = Field(
        "kuhn-poker", description='deals of Kuhn poker; they need [environment] kind = "kuhn-poker"'
    )

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.kind


class SeedPrompts(PromptBase):
    """Seeds. An environment makes one task from each seed."""

    kind: Literal["seeds"] = Field(
        "seeds",
        description="numbered questions without an answer, for an environment that makes its task from the column seed",
    )
    question: str = Field("Task {seed}.", description='text of each question, in which the seed replaces "{seed}"')
    row: dict[str, Any] = Field(
        default_factory=dict,
        description="further columns of each question's row, for example the name of an environment",
    )
    name: str = Field("seeds", min_length=1, description="name of this prompt source in metrics")

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.name

    @model_validator(mode="after")
    def _check_question(self) -> Self:
        if SEED not in self.question:
            refuse(
                "prompts.question",
                self.question,
                f"without {SEED}, two prompts could have the same text; write {SEED} into the question",
            )
        return self


def find_game_faults(
    sources: Sequence[PromptBase], environment: Section, cold: Section | None
) -> Iterator[tuple[str, object, str]]:
    """Yield the config key, the value and the fix for each prompt source and environment that do not play the same
    game, and for seeds in a run with a cold start (`cold`).
    """
    kind, turns = str(getattr(environment, "kind", "")), getattr(environment, "max_turns", None)
    for which, source in enumerate(sources):
        asked = str(getattr(source, "kind", ""))
        if isinstance(source, SeedPrompts) and kind == "single-turn":
            cure = "its questions have no answer; choose an environment that makes its task from the seed"
            yield f"prompts.{which}.kind", asked, cure
        elif isinstance(source, SeedPrompts) and cold is not None:
            cure = "a cold start needs demonstrations, which seeds do not have; set policy.path to a trained policy"
            yield f"prompts.{which}.kind", asked, cure
        elif isinstance(source, GamePrompts | KuhnPokerPrompts) and asked != kind:
            cure = f'its prompts are played in an environment; set environment.kind = "{asked}"'
            yield f"prompts.{which}.kind", asked, cure
        elif kind in GAMES and asked != kind:
            cure = f'it plays only prompts of its game; set prompts.kind = "{kind}", or choose another environment'
            yield "environment.kind", kind, cure
        elif isinstance(source, GamePrompts) and turns is not None and source.moves > turns:
            cure = f"no episode has more than environment.max_turns = {turns} moves; lower it, or raise that key"
            yield f"prompts.{which}.moves", source.moves, cure
        elif isinstance(source, KuhnPokerPrompts) and (source.chat or source.template is not None):
            key, value = ("chat", True) if source.chat else ("template", source.template)
            cure = "the players read only their card and the actions, one letter each; remove the key"
            yield f"prompts.{which}.{key}", value, cure
