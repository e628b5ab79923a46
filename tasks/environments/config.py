"""Defines the `[environment]` section of the config, with one class for each kind of environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Imported, Section

EPISODES = {"kind": "the trajectories in the log are its episodes"}


class EnvironmentBase(Section):
    """Base class of the configs of all kinds of environment."""

    fixed: ClassVar[Mapping[str, str]] = EPISODES

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The environment's tools, by name. An environment config with tools overrides this property."""
        return {}


class SingleTurnEnvironment(EnvironmentBase):
    """An environment with a single turn: one prompt, one response, one reward."""

    kind: Literal["single-turn"] = Field(
        "single-turn",
        description="environment with a single turn, in which an episode is one prompt, one response and one reward",
    )


class ImportTool(Imported):
    """A tool that a user-defined environment offers to the policy."""

    seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of the tool; a call that takes longer has failed",
    )


class ImportEnvironment(Imported, EnvironmentBase):
    """A user-defined environment, which may have several turns and tools."""

    kind: Literal["import"] = Field(
        "import", description="your own environment, imported from a class that derives from Environment"
    )
    tools: dict[str, ImportTool] = Field(
        default_factory=dict,
        description="tools of the environment by name; a tool is an asynchronous function that is annotated to "
        "return a ToolResult",
    )

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The tools that the config section `[environment.tools]` defines, by name."""
        return self.tools


EnvironmentConfig = Annotated[SingleTurnEnvironment | ImportEnvironment, Field(discriminator="kind")]
