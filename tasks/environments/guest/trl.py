"""Adapts a class that follows the contract of TRL's `environment_factory`.

Each object of the user's class serves one episode. `reset(**row)` returns None or a text for the policy. `get_reward()`
returns the reward of the episode. In a class with a `render_mode`, `render()` shows the state to people. Every other
public method is a tool, except those that `durable` describes. Methods may be asynchronous.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollflow.tasks.environments.guest.durable import DurableParts
from rollflow.tasks.environments.guest.frames import pack_frame
from rollflow.tasks.environments.guest.schema import build_schema
from rollflow.tasks.environments.guest.wire import LONGEST_TEXT, EnvironmentFault, Fields, describe_error

LONGEST_NAME = 100  # largest number of characters of a wrong tool name in an error message


class TrlGuest:
    """Serves an episode with an object of the user's class."""

    def __init__(self, spec: Fields, parts: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._own = parts["path"](**spec["options"])
        if not callable(getattr(self._own, "reset", None)):
            raise EnvironmentFault(
                "the environment's class has no method reset; write `def reset(self, **row) -> str | None`"
            )
        self._durable = DurableParts(self._own, self._finish)
        self._renders = bool(getattr(self._own, "render_mode", None)) and callable(getattr(self._own, "render", None))
        hidden = {"reset", "get_reward", *self._durable.names, *(["render"] if self._renders else [])}
        methods = inspect.getmembers(self._own, inspect.ismethod)
        self._tools: dict[str, Callable[..., Any]] = {
            name: method for name, method in methods if not name.startswith("_") and name not in hidden
        }

    def describe(self) -> Fields:
        """Return the schemas of the tools, and whether the class computes the reward."""
        tools = [build_schema(name, method) for name, method in self._tools.items()]
        has_reward = callable(getattr(self._own, "get_reward", None))
        return {"tools": tools, "has_reward": has_reward, **self._durable.describe()}

    def do_reset(self, row: Mapping[str, Any], seed: int) -> Fields:
        """Begin the episode: call `reset` with the columns of a prompt's row."""
        found = self._finish(self._own.reset(**select_arguments(self._own.reset, row)))
        return {"text": None if found is None else read_content(found)}

    def do_call(self, name: str, arguments: Any, key: str = "") -> Fields:
        """Call a tool; if the call fails, the policy reads the error as the result. `key` identifies the call in its
        run."""
        if name not in self._tools:
            tools = ", ".join(self._tools) or "none"
            return {"error": f"there is no tool {name[:LONGEST_NAME]!r}; the tools are {tools}"}
        if not isinstance(arguments, dict):
            return {"error": "the arguments are not a JSON object"}
        try:
            found = self._durable.begin_action(key)
            if found is None:
                found = self._finish(self._tools[name](**arguments))
            return {"text": read_content(found)}
        except EnvironmentFault:
            raise
        except BaseException as error:  # noqa: BLE001 - a tool is the user's code, called as the policy wants
            return {"error": describe_error(error)}

    def do_reward(self) -> Fields:
        """Compute the reward of the episode."""
        return {"value": float(self._finish(self._own.get_reward()))}

    def do_render(self) -> Fields:
        """Return what the environment renders, for people."""
        return pack_frame(self._finish(self._own.render())) if self._renders else {}

    def do_snapshot(self) -> Fields:
        """Return the state of the episode."""
        return self._durable.take_snapshot()

    def do_restore(self, data: str) -> Fields:
        """Restore the state that the episode had when a snapshot was taken."""
        return self._durable.restore(data)

    def do_close(self) -> Fields:
        """End the episode without a call, because TRL's contract has no method for the end of an episode."""
        return {}

    def _finish(self, result: Any) -> Any:
        """Wait for the result of an asynchronous method."""
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result


def select_arguments(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that are arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(row)
    return {one.name: row[one.name] for one in parameters if one.name in row}


def read_content(found: Any) -> str:
    """Return the text of an observation or of a tool's result.

    Raises:
        EnvironmentFault: the result contains an image, or other content that is not text.
    """
    if isinstance(found, list) and found and all(isinstance(one, dict) and "type" in one for one in found):
        others = [str(one["type"]) for one in found if one["type"] != "text"]
        if others:
            raise EnvironmentFault(
                f"the environment returns content of type {others[0]!r}, but a policy reads only text; return text"
            )
        return "".join(str(one.get("text", "")) for one in found)[:LONGEST_TEXT]
    return str(found)[:LONGEST_TEXT]  # TRL converts other results to text in the same way
