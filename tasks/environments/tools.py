"""Runs tools, which are asynchronous functions that an environment calls when the policy requests them.

If a call names no tool, has wrong arguments, fails or is too slow, the policy reads an error message in place of a
result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.config import ImportTool
from rollflow.tasks.runtime.imports import build_part, imported_function

LONGEST_ERROR = 200  # largest number of characters of an error message that the policy reads


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as text; `is_error` is True if the call failed."""

    text: str
    is_error: bool = False


Tool = Callable[..., Awaitable[ToolResult]]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a run, each with its time limit in seconds."""

    tools: Mapping[str, tuple[Tool, float]] = field(default_factory=dict)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool with keyword arguments; if the call fails, return the reason as the result."""
        # The policy may write any JSON value as the name of a tool.
        if not isinstance(name, str) or name not in self.tools:
            what = f"there is no tool {name!r}"[:LONGEST_ERROR]
            return ToolResult(f"{what}; the tools are {', '.join(self.tools) or 'none'}", True)
        if not isinstance(arguments, Mapping):
            return ToolResult(f"{name} failed: the arguments are a {type(arguments).__name__}, not an object", True)
        tool, seconds = self.tools[name]
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                result = await tool(**arguments)
            return result if isinstance(result, ToolResult) else ToolResult(str(result))
        except Exception as error:  # noqa: BLE001 - a tool is user code, called as the policy wants
            late = isinstance(error, TimeoutError) and limit.expired()
            why = f"it took more than {seconds:g} s" if late else f"{type(error).__name__}: {error}"
            return ToolResult(f"{name} failed: {why}"[:LONGEST_ERROR], True)


def build_toolbox(parts: Mapping[str, ImportTool]) -> Toolbox:
    """Import the tools that the config section `[environment.tools]` names.

    Raises:
        ConfigError: a tool's function does not exist, is not asynchronous, or does not take the configured options.
    """
    return Toolbox(
        {name: (_import_tool(f"environment.tools.{name}", part), part.seconds) for name, part in parts.items()}
    )


def _import_tool(key: str, part: ImportTool) -> Tool:
    function = imported_function(key, part, ToolResult)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key}.path = {part.path!r}: the function is not asynchronous; define it with `async def`")
    build_part(key, part, lambda: inspect.signature(function).bind_partial(**part.options))
    return functools.partial(function, **part.options)
