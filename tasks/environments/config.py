"""Defines the `[environment]` section of the config, with one class for each kind of environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.environments.base_config import EPISODES, EndpointRole, EnvironmentBase, ImportTool
from rollflow.tasks.environments.foreign.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.environments.timed_config import TimedEnvironmentConfig
from rollflow.tasks.environments.tool_use.config import ToolsEnvironment
from rollflow.tasks.runtime.sections import Imported, refuse

__all__ = [
    "EPISODES",
    "EnvironmentBase",
    "EnvironmentConfig",
    "GymnasiumEnvironment",
    "ImportEnvironment",
    "ImportTool",
    "MixedEnvironment",
    "SingleTurnEnvironment",
    "TimedEnvironmentConfig",
    "ToolsEnvironment",
    "TrlEnvironment",
]


MemberConfig = Annotated[TrlEnvironment | GymnasiumEnvironment | ToolsEnvironment, Field(discriminator="kind")]


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
        "turn, and must not step into a hole; the environment plays prompts of the same kind",
    )


class SokobanEnvironment(GameEnvironment):
    """The game Sokoban."""

    kind: Literal["sokoban"] = Field(
        "sokoban",
        description="the game Sokoban: the policy pushes each box onto a goal, one letter (U, D, L or R) per turn; "
        "the environment plays prompts of the same kind",
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
    endpoints: dict[str, EndpointRole] = Field(
        default_factory=dict,
        description="language models by name that play roles of the environment, such as a user, behind "
        "OpenAI-compatible endpoints",
    )

    @property
    def endpoint_roles(self) -> Mapping[str, EndpointRole]:
        """The endpoints that the config section `[environment.endpoints]` defines, by name."""
        return self.endpoints

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The tools that the config section `[environment.tools]` defines, by name."""
        return self.tools


class MixedEnvironment(EnvironmentBase):
    """Several environments in one run; a column of each prompt's row names the environment of the prompt."""

    fixed: ClassVar[Mapping[str, str]] = {**EPISODES, "column": "earlier prompts were played by this column"}
    replaces_prompts: ClassVar[bool] = True

    kind: Literal["mixed"] = Field(
        "mixed", description="several environments; a column of each prompt's row names the one that plays the prompt"
    )
    column: str = Field(
        "environment",
        min_length=1,
        description="column of a prompt's row (of its reference, with your own prompt source) that names the "
        "environment of the prompt, from [environment.kinds.NAME]",
    )
    default: str | None = Field(None, description="name of the environment of a row without this column")
    kinds: dict[str, MemberConfig] = Field(
        min_length=1,
        description="environments by name; an environment with max_failures failures in a row plays no more prompts, "
        "and other prompts replace those that name it",
        json_schema_extra={"keys_of": "environment"},
    )

    @property
    def shown_frames(self) -> int:
        """The largest number of frames (rendered states) of an episode on the run's page."""
        return max(member.shown_frames for member in self.kinds.values())

    @property
    def most_episodes(self) -> int:
        """The largest number of episodes that each of the environments plays at the same time."""
        return min(member.at_once for member in self.kinds.values())

    @model_validator(mode="after")
    def _check_default(self) -> Self:
        if self.default is not None and self.default not in self.kinds:
            refuse("environment.default", self.default, f"name one of: {', '.join(self.kinds)}")
        return self


EnvironmentConfig = Annotated[
    SingleTurnEnvironment
    | FrozenLakeEnvironment
    | SokobanEnvironment
    | KuhnPokerEnvironment
    | ImportEnvironment
    | TrlEnvironment
    | GymnasiumEnvironment
    | ToolsEnvironment
    | MixedEnvironment
    | TimedEnvironmentConfig,
    Field(discriminator="kind"),
]


def split_environments(environment: EnvironmentConfig) -> Mapping[str, EnvironmentConfig]:
    """Return the environments of a run by their config sections; there are several if the kind is "mixed"."""
    if isinstance(environment, MixedEnvironment):
        return {f"environment.kinds.{name}": member for name, member in environment.kinds.items()}
    return {"environment": environment}
