"""Defines the requests to the environment of one episode, which runs in a worker process.

A process that misses a deadline or sends an invalid answer is killed, with all processes that it has started.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import SnapshotRejected
from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded, judge_status
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.settings import WorldSettings
from rollflow.tasks.environments.guest.wire import pack_line
from rollflow.tasks.environments.limits import ComputedTime
from rollflow.tasks.scorers.base import LARGEST

OPENING = ("open", "reset")  # requests that are sent before the policy's first action


class World:
    """The environment of one episode, in a separate worker process. Subclasses define how requests reach it."""

    def __init__(self, config: WorldSettings, health: EnvironmentHealth) -> None:
        self._config, self._health = config, health
        self.described: Mapping[str, Any] = {}  # what the environment offers (its answer to `open`)
        self.opening: Mapping[str, Any] = {}  # further fields of the request `open`
        self.is_reset = False
        self.observation: str | None = None  # the first observation, once the environment is reset
        self._limits, self._used = config.limits, ComputedTime()

    @property
    def is_running(self) -> bool:
        """True if the process has started, and was not killed."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process.

        Raises:
            WorldEnded: the process cannot be started.
        """
        raise NotImplementedError

    async def exchange_line(self, line: bytes, what: str, seconds: float | None = None) -> Mapping[str, Any]:
        """Send a request as a line of JSON, and return the answer. `what` is the name of the request. By default, the
        request may take as long as the episode's time limits still allow.

        Raises:
            WorldEnded: the process had to be killed, or has ended.
        """
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        raise NotImplementedError

    async def open(self, seed: int, seconds: float | None = None) -> Mapping[str, Any]:
        """Create the environment and return the description of its tools. `seconds` replaces the time limits of the
        episode.
        """
        self.described = await self._ask({"do": "open", "seed": seed, **self.opening}, seconds)
        if not _are_tools(self.described.get("tools", [])):
            raise self._end(Outcome.UNJUDGED, "the environment's process described its tools not as a list of schemas")
        return self.described

    async def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Begin the episode with the fields of a prompt (`row`), and return the first observation."""
        self._health.resets += 1
        self.observation = self._read_text(await self._ask({"do": "reset", "row": dict(row), "seed": seed}))
        self.is_reset = True
        return self.observation

    async def call(self, name: str, arguments: Any, key: str = "", seconds: float | None = None) -> str:
        """Call a tool and return its result. `seconds` replaces the time limits of the episode. `key` identifies the
        call in its run, even after a crash.

        Raises:
            CallFailed: the tool has raised an error, which the policy may read.
            WorldEnded: the process had to be killed, or has ended.
        """
        answer = await self._act({"do": "call", "name": name, "arguments": arguments}, key, seconds)
        return self._read_text(answer) or ""

    async def step(self, text: str, key: str = "") -> Mapping[str, Any]:
        """Perform the action that a text of the policy names; `guest.episode` describes the answer. `key` identifies
        the action in its run, even after a crash."""
        return await self._act({"do": "step", "text": text}, key)

    async def reward(self) -> float:
        """Return the reward that the environment computes for the episode."""
        value = (await self._step({"do": "reward"})).get("value")
        if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > LARGEST):
            raise self._end(
                Outcome.KILLED, "the environment's process wrote a reward that is not a number, or is too large"
            )
        return float(value)

    async def take_snapshot(self) -> Mapping[str, Any] | None:
        """Return the state of the environment, with `data` in Base64. If the environment cannot return its state, a
        warning is logged and the result is None.
        """
        try:
            answer = await self._ask({"do": "snapshot"})
        except CallFailed as failed:
            logging.getLogger(__name__).warning("environment.%s: no snapshot was stored: %s", self._health.name, failed)
            return None
        if not isinstance(answer.get("data"), str):
            raise self._end(Outcome.KILLED, "the environment's process wrote a snapshot without data")
        return answer

    async def restore(self, fields: Mapping[str, Any]) -> None:
        """Restore the state that the environment had when a snapshot was taken.

        Raises:
            SnapshotRejected: the environment cannot be restored.
        """
        try:
            await self._ask({"do": "restore", **fields})
        except (CallFailed, WorldEnded) as error:
            raise SnapshotRejected(str(error)) from error

    async def close(self) -> None:
        """Close the environment; a process that does not close in time is killed."""
        with contextlib.suppress(CallFailed, WorldEnded):
            await self._ask({"do": "close"}, self._config.close_seconds)

    def begin_turn(self) -> None:
        """Record that the policy has generated a turn, so that the time limit of a turn begins again."""
        self._used.begin_turn()

    async def _act(self, request: Mapping[str, Any], key: str, seconds: float | None = None) -> Mapping[str, Any]:
        """Send an action. Its key is sent only if the environment supports keys."""
        return await self._step({**request, "key": key} if self.described.get("begins_actions") else request, seconds)

    async def _step(self, request: Mapping[str, Any], seconds: float | None = None) -> Mapping[str, Any]:
        self._health.steps += 1
        return await self._ask(request, seconds)

    async def _ask(self, request: Mapping[str, Any], seconds: float | None = None) -> Mapping[str, Any]:
        """Send a request and return the answer, as `exchange_line` specifies."""
        what = str(request["do"])
        try:
            line = pack_line(dict(request))
        except RecursionError:  # the policy may have nested the arguments of a call too deeply
            return self._check({"error": "the arguments are nested too deeply"}, what)
        return self._check(await self.exchange_line(line, what, seconds), what)

    def _bound_seconds(self, what: str, seconds: float | None) -> tuple[float, str]:
        """Return the seconds that a request may take, and the error message if it takes longer."""
        if seconds is None:
            return self._limits.bound_seconds(self._used)
        return seconds, f"{what} took more than {seconds:g} s"

    def _check(self, answer: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        """Return an answer, or raise the error that the answer reports."""
        if "fault" in answer:
            raise self._end(Outcome.UNJUDGED, str(answer["fault"]))
        if "lost" in answer:
            raise self._judge_part(answer, what)
        if "error" in answer:
            if what in OPENING:
                raise self._end(Outcome.UNJUDGED, f"the environment's {what} failed with {answer['error']}")
            raise CallFailed(str(answer["error"]))
        return answer

    def _read_text(self, answer: Mapping[str, Any]) -> str | None:
        text = answer.get("text")
        if text is not None and not isinstance(text, str):
            raise self._end(Outcome.UNJUDGED, "the environment's process wrote an observation that is not text")
        return text

    def _end(self, outcome: Outcome, reason: str) -> WorldEnded:
        """Kill the process, and return an error with this outcome and reason."""
        self._health.kills += self.is_running
        self.kill()
        return WorldEnded(outcome, reason)

    def _judge_part(self, answer: Mapping[str, Any], what: str) -> WorldEnded:
        """Return the error for a part of the environment, such as an MCP server, that ended during a call or must be
        ended.
        """
        status = answer.get("status")
        found = judge_status(status, what) if isinstance(status, int) else None
        self._health.crashes += found is not None
        end = f" ({found})" if found else ""
        said = f", and said: {answer['said']}" if answer.get("said") else ""
        return self._end(found.outcome if found else Outcome.KILLED, f"{answer['lost']}{end}{said}")


def _are_tools(found: Any) -> bool:
    """Return whether `found` is a list of tool schemas, each with a function that has a name."""
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        return False
    functions = [tool.get("function") for tool in found]
    return all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions)
