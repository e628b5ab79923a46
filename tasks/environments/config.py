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
    """One prompt, one response, one reward."""

    kind: Literal["single-turn"] = Field(
        "single-turn", description="an episode is one prompt, one response, and the verifier's reward"
    )


class ImportTool(Imported):
    """A tool of a user-defined environment."""

    seconds: float = Field(
        30.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for one call; after that the call has failed"
    )


class ImportEnvironment(Imported, EnvironmentBase):
    """A user-defined environment."""

    kind: Literal["import"] = Field("import", description="your own environment: a class that derives from Environment")
    tools: dict[str, ImportTool] = Field(
        default_factory=dict,
        description="tools by name: your asynchronous functions, annotated to return a ToolResult",
    )

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The tools that the config section `[environment.tools]` defines, by name."""
        return self.tools


EnvironmentConfig = Annotated[SingleTurnEnvironment | ImportEnvironment, Field(discriminator="kind")]
