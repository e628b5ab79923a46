"""A session in a sandbox on a ROCK server, controlled by the HTTP requests `create_session`, `run_in_session` and
`close_session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollflow.tasks.sandboxes.base import ProgramEnd, SandboxFailed, SessionKind, SessionResult
from rollflow.tasks.sandboxes.figures import KindCounter

START_SECONDS = 10.0  # seconds allowed for the first program, and for the start of a session
KILLED = -9
Answer = Mapping[str, Any]
Send = Callable[[str, float, Mapping[str, Any]], Awaitable[Answer]]


class RequestFailed(Exception):
    """Raised if a ROCK server answered that a request failed; `result` is the result in the answer."""

    def __init__(self, message: str, result: Answer) -> None:
        super().__init__(message)
        self.result = result


class RockSession:
    """A session in a sandbox on a ROCK server; see `base.SandboxSession`. The output of a run has no whitespace at its
    ends.
    """

    def __init__(
        self,
        send: Send,
        kind: SessionKind,
        env: Mapping[str, str],
        folder: str,
        counter: KindCounter,
        user: str,
    ) -> None:
        """Prepare a session that starts in `folder` and runs as `user`; `send` sends a request to the sandbox, and
        `counter` counts the runs.
        """
        self._send, self._env, self._counter = send, env, counter
        self._user = {"remote_user": user} if user else {}
        shell = f"export HOME={folder}; mkdir -p {folder}; cd {folder}"
        python = f"import os; os.makedirs({folder!r}, exist_ok=True); os.chdir({folder!r}); del os"
        self._enter = shell if kind is SessionKind.SHELL else python
        self._has_entered = False
        self._type = "bash" if kind is SessionKind.SHELL else "python"
        self._turn = asyncio.Lock()
        self._name = ""

    async def open(self) -> None:
        """Open the session on the server under a new name.

        Raises:
            SandboxFailed: the sandbox has no sessions of this kind, or is closed.
        """
        self._name, self._has_entered = f"rollflow-{uuid.uuid4().hex}", False
        body = {"session": self._name, "session_type": self._type, "env": dict(self._env), "env_enable": True}
        body |= {"startup_timeout": START_SECONDS, **self._user}
        try:
            await self._send("/create_session", 0, body)
        except RequestFailed as error:
            raise SandboxFailed(f"the server could not open a session of the type {self._type!r}: {error}") from None

    async def run(self, code: str, timeout: float = 10.0) -> SessionResult:
        """Run code in the session; see `SandboxSession.run`. If the server cannot interrupt commands, a command that
        takes too long ends the session, and a new session is opened.
        """
        return await self._counter.watch(self._run_code(code, timeout))

    async def _run_code(self, code: str, timeout: float) -> SessionResult:
        async with self._turn:
            began = time.monotonic()
            try:
                if not self._has_entered:
                    await self._run(self._enter, START_SECONDS)
                    self._has_entered = True
                found = await self._run(code, timeout)
            except RequestFailed as error:
                if "end" not in error.result:
                    await self._close()
                    await self.open()
                    end = ProgramEnd.TIMEOUT if time.monotonic() - began >= timeout else ProgramEnd.EXITED
                    return SessionResult(end, KILLED, b"", time.monotonic() - began, f"the session failed: {error}")
                found = error.result
            code_found, lost = found.get("exit_code"), str(found.get("lost") or "")
            self._has_entered = not lost
            return SessionResult(
                ProgramEnd(found.get("end") or "exited"),
                code_found if isinstance(code_found, int) else KILLED,
                str(found.get("output") or "").encode(errors="replace"),
                time.monotonic() - began,
                lost,
            )

    async def _run(self, code: str, timeout: float) -> Answer:
        body = {"session": self._name, "command": code, "timeout": timeout, "check": "silent", "action_type": "bash"}
        return await self._send("/run_in_session", timeout, body)

    async def close(self) -> None:
        """End the session; see `SandboxSession.close`."""
        async with self._turn:
            await self._close()

    async def _close(self) -> None:
        with contextlib.suppress(RequestFailed, SandboxFailed):
            await self._send("/close_session", 0, {"session": self._name, "session_type": "bash"})
