"""Defines the `[environment]` section of the config, with one class for each kind of environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.environments.base_config import EPISODES, EnvironmentBase, ImportTool
from rollflow.tasks.environments.foreign.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.runtime.sections import Imported

__all__ = [
    "EPISODES",
    "EnvironmentBase",
    "EnvironmentConfig",
    "GymnasiumEnvironment",
    "ImportEnvironment",
    "ImportTool",
    "SingleTurnEnvironment",
    "TrlEnvironment",
]


class SingleTurnEnvironment(EnvironmentBase):
    """An environment with a single turn: one prompt, one response, one reward."""

    kind: Literal["single-turn"] = Field(
        "single-turn",
        description="environment with a single turn, in which an episode is one prompt, one response and one reward",
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


EnvironmentConfig = Annotated[
    SingleTurnEnvironment | ImportEnvironment | TrlEnvironment | GymnasiumEnvironment, Field(discriminator="kind")
]
