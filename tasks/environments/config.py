"""Defines the `[environment]` section of the config, with one class for each kind of environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollflow.tasks.environments.base_config import EPISODES, EnvironmentBase, ImportTool
from rollflow.tasks.environments.foreign.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.environments.timed_config import TimedEnvironmentConfig
from rollflow.tasks.environments.tool_use.config import ToolsEnvironment
from rollflow.tasks.runtime.sections import Imported

__all__ = [
    "EPISODES",
    "EnvironmentBase",
    "EnvironmentConfig",
    "GymnasiumEnvironment",
    "ImportEnvironment",
    "ImportTool",
    "SingleTurnEnvironment",
    "TimedEnvironmentConfig",
    "ToolsEnvironment",
    "TrlEnvironment",
]


class SingleTurnEnvironment(EnvironmentBase):
    """An environment with a single turn: one prompt, one response, one reward."""

    kind: Literal["single-turn"] = Field(
        "single-turn",
        description="environment with a single turn, in which an episode is one prompt, one response and one reward",
    )


class GameEnvironment(LimitedEnvironment, EnvironmentBase):
    """Base class of the configs of games, in which the policy writes one letter per turn: U, D, L or R."""

    max_turns: int = Field(10, ge=1, le=1000, description="largest number of turns of an episode of a game")


class FrozenLakeEnvironment(GameEnvironment):
    """The game FrozenLake without slipping: every move succeeds."""

    kind: Literal["frozen-lake"] = Field(
        "frozen-lake",
        description="the game FrozenLake without slipping: the policy walks to the goal, one letter (U, D, L or R) per "
        "turn, and must not step into a hole; it plays prompts of the same kind",
    )


class SokobanEnvironment(GameEnvironment):
    """The game Sokoban."""

    kind: Literal["sokoban"] = Field(
        "sokoban",
        description="the game Sokoban: the policy pushes each box onto a goal, one letter (U, D, L or R) per turn; it "
        "plays prompts of the same kind",
    )


class KuhnPokerEnvironment(EnvironmentBase):
    """Kuhn poker in self-play."""

    replaces_prompts: ClassVar[bool] = True

    kind: Literal["kuhn-poker"] = Field(
        "kuhn-poker",
        description="Kuhn poker in self-play: the policy plays both players, one letter (p: pass, b: bet) per turn; "
        "each player is a role with its own reward; the environment plays prompts of the same kind",
    )


class ImportEnvironment(Imported, LimitedEnvironment, EnvironmentBase):
    """A user-defined environment, which may have several turns and tools."""

    replaces_prompts: ClassVar[bool] = True

    kind: Literal["import"] = Field(
        "import", description="your own environment, imported from a class that derives from Environment"
    )
    tools: dict[str, ImportTool] = Field(
        default_factory=dict,
        description="tools of the environment by name; a tool is an asynchronous function that is annotated to return "
        "a ToolResult",
    )

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The tools that the config section `[environment.tools]` defines, by name."""
        return self.tools


EnvironmentConfig = Annotated[
    SingleTurnEnvironment
    | FrozenLakeEnvironment
    | SokobanEnvironment
    | KuhnPokerEnvironment
    | ImportEnvironment
    | TrlEnvironment
    | GymnasiumEnvironment
    | ToolsEnvironment
    | TimedEnvironmentConfig,
    Field(discriminator="kind"),
]
