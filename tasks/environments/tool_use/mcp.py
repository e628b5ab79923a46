"""Provides the tools of MCP servers. Each episode starts its own servers, each in a worker process (see `guest.mcp`).

A server that hangs, crashes or writes an invalid message ends only its own episode. After an episode, all processes
that its servers have started are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded
from rollflow.tasks.environments.foreign.pool import WorldPool
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.environments.limits import NO_LIMITS, EpisodeLimits
from rollflow.tasks.environments.tool_use.config import McpServer
from rollflow.tasks.environments.tool_use.offered import OfferedTool

CLOSE_SECONDS = 2.0  # seconds that a server may take to end itself after its episode


@dataclass(frozen=True)
class McpSettings:
    """The settings of the worker process that runs an MCP server (see `foreign.settings`)."""

    server: McpServer
    at_once: int
    interpreter: str = ""
    close_seconds: float = CLOSE_SECONDS
    limits: EpisodeLimits = NO_LIMITS  # `McpSession` sets a deadline for each request

    @property
    def spec(self) -> Mapping[str, Any]:
        """The values that a worker process needs to start the server."""
        keys = self.server.model_dump(mode="json", include={"command", "env", "pass_env", "prefix"})
        return {"kind": "mcp", "folder": "", "cwd": self.server.folder, **keys}

    @property
    def start_seconds(self) -> float:
        """Seconds allowed for the start of the worker processes."""
        return self.server.start_seconds


class McpSession:
    """The MCP server of one episode."""

    def __init__(self, name: str, server: McpServer, world: World) -> None:
        self._name, self._server, self._world = name, server, world

    async def list_tools(self) -> list[OfferedTool]:
        """Start the server, and return its tools.

        Raises:
            WorldEnded: the server does not start, or offers no usable tools.
        """
        try:
            described = await self._world.open(0, self._server.start_seconds)
        except WorldEnded as ended:
            raise self._name_end(ended) from None
        return [
            OfferedTool(schema, functools.partial(self._call, schema["function"]["name"]))
            for schema in described["tools"]
        ]

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server, and return its result.

        Raises:
            CallFailed: the server has refused the call, or the tool has failed.
            WorldEnded: the server had to be killed, or has ended.
        """
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:  # such arguments are no JSON, so no server could read them
            raise CallFailed(f"the arguments of the tool call are not valid JSON ({error})") from None
        try:
            return await self._world.call(name, arguments, seconds=self._server.seconds)
        except WorldEnded as ended:
            raise self._name_end(ended) from None

    def _name_end(self, ended: WorldEnded) -> WorldEnded:
        named = WorldEnded(ended.outcome, f"MCP server {self._name}: {ended}")
        named.is_counted = ended.is_counted
        return named


@contextlib.asynccontextmanager
async def open_session(name: str, server: McpServer, pool: WorldPool) -> AsyncIterator[McpSession]:
    """Start a worker process for the MCP server of an episode; end both at the end of the block.

    Raises:
        WorldEnded: no process can be started.
        ConfigError: the environment counts as broken, because too many episodes in a row failed.
    """
    async with pool.open() as world:
        yield McpSession(name, server, world)
        await world.close()  # not reached after an error; then the process is killed at once


async def list_all_tools(sessions: Sequence[McpSession]) -> list[OfferedTool]:
    """Start the servers of an episode at the same time, and return their tools.

    Raises:
        WorldEnded: a server does not start, or offers no usable tools.
    """
    lists = await asyncio.gather(*(session.list_tools() for session in sessions), return_exceptions=True)
    for found in lists:
        if isinstance(found, BaseException):
            raise found
    return [tool for found in lists if not isinstance(found, BaseException) for tool in found]
