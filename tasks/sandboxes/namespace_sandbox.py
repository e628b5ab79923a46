"""The client of a sandbox in a container, the box: sends requests to the process that supervises the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from rollflow.tasks.sandboxes.base import ExecResult, Program, ProgramEnd, SandboxFailed, SandboxLost, refuse_user
from rollflow.tasks.sandboxes.box.wire import CHUNK, LENGTHS, pack
from rollflow.tasks.sandboxes.figures import KindCounter

GRACE_SECONDS = 5.0  # seconds that a sandbox may take to answer, in addition to the deadline of its program


class NamespaceSandbox:
    """The client of a sandbox in a container, the box.

    The process that supervises the sandbox is at the other end of the socket `keeper`.
    """

    def __init__(self, keeper: socket.socket, kill: Callable[[], None], counter: KindCounter | None = None) -> None:
        """Use a sandbox; `kill` kills its supervising process, and `counter` counts the programs."""
        self._keeper, self._kill, self._counter = keeper, kill, counter
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._received = bytearray()  # bytes that were received but not read yet
        self._is_renewing = False  # True if the sandbox is to be emptied after the last program

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the sandbox's folder is mounted."""
        try:
            async with asyncio.timeout(seconds):
                header, _ = await self._receive()
        except TimeoutError:
            await self.close()
            raise SandboxFailed(f"the sandbox did not answer within {seconds:g} s") from None
        if "broken" in header:
            await self.close()
            raise SandboxFailed(f"the sandbox could not be created: {header['broken']}")

    async def exec(self, program: Program, *, renew: bool = False) -> ExecResult:
        """Run a program in this sandbox; see `Sandbox.exec`. With `renew`, the sandbox is emptied after the program,
        and the next request must wait for `wait_renewed`.
        """
        refuse_user(program.user)
        running = self._run(program, renew=renew)
        if self._counter is None:
            return await running
        with self._counter.use():
            return await self._counter.watch(running)

    async def _run(self, program: Program, *, renew: bool) -> ExecResult:
        request = {
            "do": "exec",
            "command": list(program.command),
            "code": program.code,
            "name": program.name,
            "arguments": list(program.arguments),
            "env": dict(program.env),
            "cwd": program.cwd,
            "timeout": program.timeout,
            "keep_children": program.keep_children,
            "renew": renew,
        }
        was_closed = self._is_closed
        self._is_renewing = renew
        try:
            found, output = await self._ask(request, program.stdin, program.timeout, program.channel)
        except SandboxFailed as error:
            if was_closed:
                raise
            raise SandboxLost(str(error)) from None
        stdout = found["stdout"]
        return ExecResult(ProgramEnd(found["end"]), found["code"], output[:stdout], output[stdout:], found["seconds"])

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file in this sandbox; see `Sandbox.upload`."""
        await self._ask({"do": "upload", "path": path}, data)

    async def download(self, path: str) -> bytes:
        """Read a file of this sandbox; see `Sandbox.download`."""
        return (await self._ask({"do": "download", "path": path}))[1]

    async def wait_renewed(self) -> None:
        """Wait until all processes in the sandbox are killed and its files are deleted, so that the sandbox is like a
        new one.

        Raises:
            SandboxFailed: the sandbox cannot be renewed, for example because a program did not end by itself; the
            sandbox is closed.
        """
        if self._is_renewing:
            await self._exchange(b"", 0.0)
            self._is_renewing = False

    async def close(self) -> None:
        """Kill all processes in the sandbox and delete its files; see `Sandbox.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._kill()
            with contextlib.suppress(OSError):
                self._keeper.shutdown(socket.SHUT_RDWR)  # end the wait for the answer to a request
            if not self._turn.locked():
                self._keeper.close()

    async def _ask(
        self, request: Mapping[str, Any], body: bytes = b"", seconds: float = 0.0, channel: socket.socket | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request to the sandbox's supervising process and wait for the answer; `seconds` is the deadline of the
        program.
        """
        header, data = await self._exchange(pack(dict(request), body), seconds, channel)
        if "errno" in header:
            raise OSError(header["errno"], header["error"], request.get("path"))
        return header, data

    async def _exchange(
        self, message: bytes, seconds: float, channel: socket.socket | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Send a message to the sandbox's supervising process and wait for an answer."""
        seconds += GRACE_SECONDS
        async with self._turn:
            if self._is_closed:
                raise SandboxFailed("the sandbox is closed, so it runs no more programs")
            try:
                async with asyncio.timeout(seconds):
                    await self._send(message, channel)
                    header, data = await self._receive()
            except TimeoutError:
                await self.close()
                raise SandboxFailed(f"the sandbox did not answer within {seconds:g} s") from None
            except OSError as error:
                await self.close()
                raise SandboxFailed(f"the sandbox has ended: {error}") from None
            except BaseException:
                await self.close()  # a late answer would otherwise be taken for the answer to the next request
                raise
            finally:
                if self._is_closed:
                    self._keeper.close()
        if "broken" in header:
            await self.close()
            raise SandboxFailed(f"the sandbox has ended: {header['broken']}")
        return header, data

    async def _send(self, message: bytes, channel: socket.socket | None) -> None:
        if channel is not None:
            await send_with(self._keeper, message[:1], channel.fileno())
            channel.close()
            message = message[1:]
        if message:
            await asyncio.get_running_loop().sock_sendall(self._keeper, message)

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        header, body = LENGTHS.unpack(await self._read(LENGTHS.size))
        return json.loads(await self._read(header)), await self._read(body)

    async def _read(self, count: int) -> bytes:
        """Read `count` bytes; keep further bytes, which belong to the next message."""
        loop = asyncio.get_running_loop()
        while len(self._received) < count:
            part = await loop.sock_recv(self._keeper, min(max(count - len(self._received), CHUNK), 16 * CHUNK))
            if not part:
                raise SandboxFailed("the sandbox has ended, because its process was killed")
            self._received += part
        data = bytes(self._received[:count])
        del self._received[:count]
        return data


async def send_with(connection: socket.socket, data: bytes, descriptor: int) -> None:
    """Send data and a file descriptor over a Unix socket, retrying while the socket's buffer is full."""
    while True:
        try:
            socket.send_fds(connection, [data], [descriptor])
            return
        except BlockingIOError:
            await asyncio.sleep(0.001)
        except OSError as error:
            raise SandboxFailed(f"the process that creates sandboxes has ended: {error}") from None
