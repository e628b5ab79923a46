"""A workspace (a sandbox with sessions for an agent's tools) on this machine: sends requests to the guest, a process in
the sandbox.

The guest process starts with the first request. The guest is killed if the processes of the sandbox exceed a limit; a
command can kill the guest, too. If the guest is killed, running requests get a result that says so, and the next
request starts a new guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollflow.tasks.sandboxes.base import (
    NO_VARIABLES,
    ExecResult,
    Program,
    ProgramEnd,
    Sandbox,
    SandboxFailed,
    SandboxLost,
    SessionKind,
    SessionResult,
    refuse_user,
)
from rollflow.tasks.sandboxes.box.wire import CHUNK, LENGTHS, pack
from rollflow.tasks.sandboxes.figures import KindCounter

PACKAGE = "rollflow.tasks.sandboxes"
MODULES = ("box.wire", "box.tree", "host.files", "guest.process", "guest.session", "guest.serve")
LIFETIME = 7 * 86400.0  # seconds that a guest may run
FILE_SECONDS = 60.0
STOP_SECONDS = 15.0  # seconds that the process in the sandbox may take to stop a command after its time limit
KILLED = -9


class GuestEnded(Exception):
    """Raised if the process that runs commands in a sandbox ended before it answered; `end` is the reason."""

    def __init__(self, end: ProgramEnd, message: str) -> None:
        super().__init__(message)
        self.end = end


class BoxWorkspace:
    """A workspace (a sandbox with sessions) in any sandbox with the capability CHANNEL."""

    def __init__(
        self, sandbox: Sandbox, output_bytes: int, file_bytes: int, counter: KindCounter, *, is_isolated: bool
    ) -> None:
        """Use a sandbox; `output_bytes` and `file_bytes` are the largest sizes of an output and of a file, and
        `counter` counts commands and runs of sessions.

        Without `is_isolated`, only files below the sandbox's folder can be read and written, and links are not
        followed.
        """
        self._sandbox, self.output_bytes, self._file_bytes = sandbox, output_bytes, file_bytes
        self._is_isolated, self.counter = is_isolated, counter
        counter.note_use(1)
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._guest: GuestConnection | None = None
        self._is_closed = False

    async def open_session(
        self,
        kind: SessionKind = SessionKind.SHELL,
        env: Mapping[str, str] = NO_VARIABLES,
        start: Sequence[str] = (),
        *,
        user: str = "",
    ) -> BoxSession:
        """Open a session; see `Workspace.open_session`. A shell runs the lines in `start` first, without showing their
        output.
        """
        self._check()
        refuse_user(user)
        return BoxSession(self, next(self._numbers), {"kind": kind, "env": dict(env), "start": list(start)})

    async def exec(self, program: Program) -> ExecResult:
        """Run a command; see `Workspace.exec`."""
        return await self.counter.watch(self._exec(program))

    async def _exec(self, program: Program) -> ExecResult:
        if not program.command or program.channel is not None:
            raise SandboxFailed(
                "a workspace runs commands without a channel, but this program needs one; run code in a session instead"
            )
        refuse_user(program.user)
        request = {
            "do": "exec",
            "command": list(program.command),
            "env": dict(program.env),
            "cwd": program.cwd,
            "timeout": program.timeout,
            "keep_children": program.keep_children,
            "most": self.output_bytes,
        }
        began = time.monotonic()
        try:
            found, output = await self.ask(request, program.stdin, program.timeout)
        except GuestEnded as ended:
            return ExecResult(ended.end, KILLED, b"", f"{ended}\n".encode(), time.monotonic() - began)
        except SandboxLost as lost:
            if self._is_isolated:
                raise
            return ExecResult(ProgramEnd.EXITED, KILLED, b"", f"{lost}\n".encode(), time.monotonic() - began)
        stdout = found["stdout"]
        return ExecResult(ProgramEnd(found["end"]), found["code"], output[:stdout], output[stdout:], found["seconds"])

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file; see `Workspace.upload`."""
        await self._move_file({"do": "upload", "path": path}, data)

    async def download(self, path: str) -> bytes:
        """Read a file; see `Workspace.download`."""
        return await self._move_file({"do": "download", "path": path, "most": self._file_bytes})

    async def is_alive(self) -> bool:
        """Return whether the sandbox can run a command; see `Workspace.is_alive`."""
        try:
            return not self._is_closed and (await self._exec(Program(command=["true"], keep_children=True))).succeeded
        except SandboxFailed:
            return False

    def has_failed(self) -> bool:
        """Return whether the sandbox is known to be closed or dead, without a request to the sandbox."""
        return self._is_closed or (self._guest is not None and self._guest.has_failed())

    async def end_processes(self) -> None:
        """Kill all sessions and commands of the sandbox; keep its files."""
        if guest := self._guest:
            self._guest = None
            await guest.end()

    async def close(self) -> None:
        """Kill all processes in the sandbox and delete its files; see `Workspace.close`."""
        if not self._is_closed:
            self.counter.note_use(-1)
        self._is_closed = True
        await self._sandbox.close()
        await self.end_processes()

    async def ask(
        self, request: dict[str, Any], body: bytes = b"", seconds: float = 0.0
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request to the process in the sandbox and return its answer; `seconds` is the time limit of the
        request.

        Raises:
            GuestEnded: the guest ended, or did not answer in time and the sandbox was closed.
            SandboxFailed: the sandbox failed, or is closed.
            OSError: the guest could not execute the request.
        """
        self._check()
        async with self._starting:
            if self._guest and self._guest.has_ended():
                await self.end_processes()
            self._guest = self._guest or GuestConnection(self._sandbox)
        guest = self._guest
        try:
            async with asyncio.timeout(seconds + STOP_SECONDS):
                found, data = await guest.ask(request, body)
        except TimeoutError:
            # A command may have stopped the process in the sandbox or exhausted the memory, so the sandbox is closed.
            await self.close()
            raise GuestEnded(ProgramEnd.TIMEOUT, "the sandbox did not answer in time, so it was ended") from None
        if "errno" in found:
            raise OSError(found["errno"], found["error"], request.get("path"))
        return found, data

    async def _move_file(self, request: dict[str, Any], data: bytes = b"") -> bytes:
        """Read or write a file in the sandbox; try again once if the process in the sandbox ends before it answers."""
        for _ in range(2):
            try:
                return (await self.ask(request | {"only_below": not self._is_isolated}, data, FILE_SECONDS))[1]
            except GuestEnded as ended:
                error = ended
        raise OSError(
            5,
            f"the file could not be read or written, because the sandbox's processes were killed: {error}",
            request["path"],
        )

    def _check(self) -> None:
        if self._is_closed:
            raise SandboxFailed("the sandbox is closed, so it runs no more commands")


class BoxSession:
    """A session in a workspace; see `base.SandboxSession`."""

    def __init__(self, workspace: BoxWorkspace, number: int, opened: dict[str, Any]) -> None:
        self._workspace = workspace
        self._opened = opened | {"session": str(number), "cwd": "."}
        self._turn = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None  # waits for the end of a run that was cancelled

    async def run(self, code: str, timeout: float = 10.0) -> SessionResult:
        """Run code in the session; see `SandboxSession.run`."""
        return await self._workspace.counter.watch(self._run(code, timeout))

    async def _run(self, code: str, timeout: float) -> SessionResult:
        async with self._turn:
            await self._wait_stopped()
            most, began = self._workspace.output_bytes, time.monotonic()
            request = self._opened | {"do": "run", "code": code, "timeout": timeout, "most": most}
            running = asyncio.create_task(self._workspace.ask(request, seconds=timeout))
            try:
                found, output = await asyncio.shield(running)
            except GuestEnded as ended:
                return SessionResult(ended.end, KILLED, b"", time.monotonic() - began, str(ended))
            except asyncio.CancelledError:
                self._stopping = asyncio.create_task(self._stop(running))
                raise
        return SessionResult(ProgramEnd(found["end"]), found["code"], output, found["seconds"], found["lost"])

    async def close(self) -> None:
        """End the session; see `SandboxSession.close`."""
        with contextlib.suppress(SandboxFailed, GuestEnded):
            async with self._turn:
                await self._wait_stopped()
                await self._workspace.ask(self._opened | {"do": "close"})

    async def _stop(self, running: asyncio.Task[Any]) -> None:
        """Interrupt the code of a run that was cancelled, and wait for its end."""
        stopping = self._workspace.ask(self._opened | {"do": "stop"})
        await asyncio.gather(stopping, running, return_exceptions=True)

    async def _wait_stopped(self) -> None:
        """Wait for the end of a run that was cancelled, because the session runs one piece of code at a time."""
        if self._stopping is not None:
            await asyncio.wait([self._stopping])


class GuestConnection:
    """A connection to the process that runs commands in a sandbox, and the requests that await its answers."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start the guest."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._numbers = itertools.count()
        self._sending = asyncio.Lock()
        program = Program(code=read_guest(), name="guest.py", channel=theirs, timeout=LIFETIME)
        self._running = asyncio.create_task(sandbox.exec(program))
        self._reading = asyncio.create_task(self._read_answers())
        self._watching = asyncio.create_task(self._watch())

    def has_ended(self) -> bool:
        """Return whether the process that runs commands has ended."""
        return self._watching.done()

    def has_failed(self) -> bool:
        """Return whether the process that runs commands has ended because its sandbox failed."""
        done = self._watching.done() and not self._watching.cancelled()
        return done and isinstance(self._watching.exception(), SandboxFailed)

    async def ask(self, request: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Send a request to the process in the sandbox and wait for its answer.

        Raises:
            GuestEnded: the guest ended before it answered.
            SandboxFailed: the sandbox failed.
        """
        number = next(self._numbers)
        answer: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if not self._watching.done():
                # The send is shielded, because a cancelled caller must not leave an incomplete message.
                await asyncio.shield(self._send(pack({**request, "number": number}, body)))
                ends: list[asyncio.Future[Any]] = [answer, self._watching]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._watching.result()
            return answer.result()
        finally:
            self._waiting.pop(number, None)

    async def end(self) -> None:
        """End the process in the sandbox, and with it all processes that it started."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([self._watching], timeout=STOP_SECONDS)
        for task in (self._running, self._reading, self._watching):
            task.cancel()
        await asyncio.gather(self._running, self._reading, self._watching, return_exceptions=True)
        self._socket.close()

    async def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # if the process has ended, `_watch` reports it
            async with self._sending:
                await asyncio.get_running_loop().sock_sendall(self._socket, message)

    async def _watch(self) -> None:
        """Wait for the end of the process in the sandbox, and raise the error that waiting requests get."""
        found = await self._running
        # Answers that the process sent before its end are read first.
        await asyncio.wait([self._reading], timeout=STOP_SECONDS)
        if found.end is ProgramEnd.EXITED:
            said = found.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            message = f"the sandbox's processes were ended: {said or f'code {found.return_code}'}"
            raise GuestEnded(found.end, message)
        raise GuestEnded(found.end, f"the sandbox's processes were killed, because they exceeded a limit: {found.end}")

    async def _read_answers(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                header, body = LENGTHS.unpack(await self._read(LENGTHS.size))
                found, data = json.loads(await self._read(header)), await self._read(body)
                if (answer := self._waiting.get(found.pop("number"))) and not answer.done():
                    answer.set_result((found, data))

    async def _read(self, count: int) -> bytes:
        data, loop = bytearray(), asyncio.get_running_loop()
        while len(data) < count:
            if not (part := await loop.sock_recv(self._socket, min(count - len(data), 16 * CHUNK))):
                raise EOFError
            data += part
        return bytes(data)


@cache
def read_guest() -> str:
    """Return the source of a Python program that contains the modules of `guest` and serves requests in a sandbox."""
    sources = {}
    for name in MODULES:
        spec = find_spec(f"{PACKAGE}.{name}")
        assert spec is not None
        assert spec.origin is not None
        sources[spec.name] = Path(spec.origin).read_text()
    return (
        f"import sys, types\nfor name, source in {sources!r}.items():\n"
        "    sys.modules[name] = module = types.ModuleType(name)\n"
        "    exec(compile(source, name, 'exec', dont_inherit=True), module.__dict__)\n"
        "module.main()\n"
    )
