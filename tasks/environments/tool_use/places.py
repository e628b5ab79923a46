"""Opens and closes the tools of each episode of the environment `tools`; at most `at_once` episodes run at a time.

The tools of an ended episode are closed before the next episode begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.pool import MakePool, WorldPool
from rollflow.tasks.environments.tool_use.config import ToolsEnvironment
from rollflow.tasks.environments.tool_use.mcp import McpSettings, list_all_tools, open_session
from rollflow.tasks.environments.tool_use.offered import OfferedTool
from rollflow.tasks.environments.tool_use.python_session import PythonSession
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Sandboxes


class ToolPlaces:
    """Limits the number of running episodes on one event loop, and owns the sandboxes and worker processes of their
    tools."""

    def __init__(self, config: ToolsEnvironment, health: EnvironmentHealth, make_pool: MakePool = WorldPool) -> None:
        self._config, self._health = config, health
        self.loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(config.at_once)
        self._sandboxes = AsyncOnce[Sandboxes](self._start_sandboxes)
        settings = {name: McpSettings(server, config.at_once) for name, server in config.mcp.items()}
        self._pools = {name: make_pool(one, health) for name, one in settings.items()}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Mapping[str, OfferedTool]]:
        """Wait until another episode may begin, and yield its open tools by name; close them at the end of the
        block.

        Raises:
            WorldEnded: a tool cannot be opened.
            ConfigError: the environment counts as broken, because too many episodes in a row failed.
        """
        async with self._places, contextlib.AsyncExitStack() as stack:
            self._health.check()
            began = self._health.failure_round
            self._health.episodes += 1
            try:
                yield name_tools(await self._open_tools(stack))
            except WorldEnded as ended:
                self._health.note_end(ended, began)
                raise

    async def close(self) -> None:
        """End the worker processes and sandboxes that the tools of all episodes share."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        if (sandboxes := self._sandboxes.found) is not None:
            await sandboxes.close()

    async def _open_tools(self, stack: contextlib.AsyncExitStack) -> list[OfferedTool]:
        """Open the tools of an episode, and register them with `stack`, which closes them."""
        tools = list[OfferedTool]()
        if self._config.python is not None:
            session = PythonSession(self._config.python, self._sandboxes, self._health)
            stack.push_async_callback(session.close)
            tools.append(session.tool)
        opening = [open_session(name, self._config.mcp[name], pool) for name, pool in self._pools.items()]
        servers = [await stack.enter_async_context(one) for one in opening]
        return [*tools, *await list_all_tools(servers)]

    async def _start_sandboxes(self) -> Sandboxes:
        assert self._config.python is not None
        sandboxes = build_sandboxes(self._config.python.sandbox)
        await sandboxes.start()
        return sandboxes


def name_tools(tools: Sequence[OfferedTool]) -> Mapping[str, OfferedTool]:
    """Return tools by name.

    Raises:
        WorldEnded: two tools have the same name.
    """
    named = {tool.name: tool for tool in tools}
    if len(named) < len(tools):
        twice = next(name for name, count in Counter(tool.name for tool in tools).items() if count > 1)
        why = f"two tools have the name {twice!r}; set environment.mcp.NAME.prefix of one server"
        raise WorldEnded(Outcome.UNJUDGED, why)
    return named
