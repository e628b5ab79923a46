"""Defines the base class of the configs of environments, and the config of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Imported, Section

EPISODES = {"kind": "the trajectories in the log are its episodes"}


class EnvironmentBase(Section):
    """Base class of the configs of all kinds of environment."""

    fixed: ClassVar[Mapping[str, str]] = EPISODES
    # True if an environment may replace the tokens of a prompt
    replaces_prompts: ClassVar[bool] = False

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The environment's tools, by name. Configs of environments with tools override `tool_parts`."""
        return {}

    @property
    def most_episodes(self) -> int | None:
        """The largest number of episodes that the environment plays at the same time; None if there is no limit."""
        return None


class ImportTool(Imported):
    """A tool that a user-defined environment can call for the policy."""

    seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of the tool; a call that takes longer fails",
    )
