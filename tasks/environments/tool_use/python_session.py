"""Provides the tool `python`. Each episode has its own Python session in its own sandbox; both are created at the first
call.

If the policy's code ends the session or the sandbox, the result of the call says so, and the next call gets a new
session. If a sandbox fails for another reason, the episode is unjudged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.tool_use.config import PythonTool
from rollflow.tasks.environments.tool_use.offered import OfferedTool
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.sandboxes.base import (
    Capability,
    ProgramEnd,
    Sandboxes,
    SandboxFailed,
    SandboxLost,
    SandboxSession,
    SessionKind,
    SessionResult,
    Workspace,
)

DESCRIPTION = (
    "Runs Python code and returns what the code prints, and the value of a last line that is an expression. "
    "Variables are kept from call to call."
)
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code to run"}},
            "required": ["code"],
        },
    },
}
LIMITS = {
    ProgramEnd.OUTPUT: "printed too much",
    ProgramEnd.MEMORY: "used too much memory",
    ProgramEnd.PROCESSES: "started too many processes",
    ProgramEnd.FOLDER: "stored too much",
}


class PythonSession:
    """The Python tool of one episode."""

    def __init__(self, config: PythonTool, sandboxes: AsyncOnce[Sandboxes], health: EnvironmentHealth) -> None:
        self._seconds, self._sandboxes, self._health = config.seconds, sandboxes, health
        self._workspace: Workspace | None = None
        self._session: SandboxSession | None = None

    @property
    def tool(self) -> OfferedTool:
        """The tool that is offered to the policy: its schema and the method `run`."""
        return OfferedTool(SCHEMA, self.run)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Run the code of a call, and return what the policy reads.

        Raises:
            CallFailed: the arguments do not fit the tool.
            WorldEnded: the sandbox failed.
        """
        code = arguments.get("code")
        if set(arguments) != {"code"} or not isinstance(code, str):
            raise CallFailed('the tool python takes exactly one argument, "code", which is text')
        self._health.steps += 1
        try:
            session = await self._open()
            found = await session.run(code, self._seconds)
            if found.lost and self._workspace is not None and not await self._workspace.is_alive():
                await self.close()  # the code has ended its own sandbox, so the next call needs a new one
        except (SandboxFailed, ConfigError, OSError) as error:
            raise await self._judge_failure(error) from None
        self._health.seconds += found.seconds
        return describe_run(found, self._seconds)

    async def close(self) -> None:
        """Kill all processes that the session has started, and delete its files."""
        workspace, self._workspace, self._session = self._workspace, None, None
        if workspace is not None:
            await workspace.close()

    async def _open(self) -> SandboxSession:
        """Return the session of the episode; if there is none, open a session and its sandbox."""
        if self._workspace is None:
            self._workspace = await (await self._sandboxes.get()).open_workspace()
        if self._session is None:
            self._session = await self._workspace.open_session(SessionKind.PYTHON)
        return self._session

    async def _judge_failure(self, error: Exception) -> WorldEnded:
        """Return the error that ends the episode. If a sandbox without isolation was lost, the outcome is `KILLED`,
        because the policy's code may have ended the sandbox; in all other cases, the episode is unjudged.
        """
        lost = isinstance(error, SandboxLost)
        isolated = lost and Capability.ISOLATION in (await self._sandboxes.get()).capabilities
        outcome = Outcome.KILLED if lost and not isolated else Outcome.UNJUDGED
        return WorldEnded(outcome, f"the sandbox of the tool python failed: {error}")


def describe_run(found: SessionResult, seconds: float) -> str:
    """Return the text that the policy reads after its code has run: output, and why the code was stopped or lost its
    variables."""
    text = found.output.decode(errors="replace")
    notes = list[str]()
    if found.end is not ProgramEnd.EXITED:
        stopped = LIMITS.get(found.end, f"took more than {seconds:g} s")
        notes.append(f"error: the code {stopped}, and was stopped")
    if found.lost:
        notes.append(f"error: all variables are lost, because {found.lost}")
    return "\n".join([*([text.rstrip("\n")] if text else []), *notes]) if notes else text
