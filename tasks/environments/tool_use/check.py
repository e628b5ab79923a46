"""Lists the tools of a config, and checks before a run begins that the MCP servers start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.foreign.check import run_apart
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.tool_use.config import ToolsEnvironment
from rollflow.tasks.environments.tool_use.places import ToolPlaces


def check_tools(config: ToolsEnvironment) -> None:
    """Start and end the MCP servers as an episode does, with the deadlines of the config.

    Raises:
        ConfigError: an MCP server does not start, or offers no usable tools; the message says what the user must
            change.
    """
    for name, server in config.mcp.items():
        key, program = f"environment.mcp.{name}", server.command[0]
        if shutil.which(program) is None:
            raise ConfigError(f"{key}.command = {program!r}: there is no such program; install it, or write its path")
        if server.folder and not Path(server.folder).is_dir():
            raise ConfigError(f"{key}.folder = {server.folder!r}: there is no such folder; write a folder's path")
        if missing := [one for one in server.pass_env if one not in os.environ]:
            raise ConfigError(f"{key}.pass_env = {missing[0]!r}: there is no such environment variable; set it")
    if config.mcp:
        list_schemas(config)


def list_schemas(config: ToolsEnvironment) -> list[Mapping[str, Any]]:
    """Return the schemas of the tools, in the order in which an episode offers them. The MCP servers are started to
    list their tools, and ended.

    Raises:
        ConfigError: an MCP server does not start, or offers no usable tools; the message says what the user must
            change.
    """
    try:
        return run_apart(_open(config))
    except WorldEnded as ended:
        cure = "correct the server's section, or allow more seconds"
        raise ConfigError(f"environment.mcp: {ended}; {cure}") from None


async def _open(config: ToolsEnvironment) -> list[Mapping[str, Any]]:
    places = ToolPlaces(config, EnvironmentHealth("mcp", config.max_failures))
    try:
        async with places.open() as tools:
            return [tool.schema for tool in tools.values()]
    finally:
        await places.close()
