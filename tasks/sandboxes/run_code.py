"""Sandboxes on a server of SandboxFusion's protocol: each program is one request `POST /run_code`.

The server runs each program in a new sandbox with the uploaded files, and keeps no files. Isolation and limits are
enforced only by the server. The protocol carries only text, so stdin, stdout and stderr must be UTF-8.

A request that fails with status 5xx, or gets no answer, is sent again after a growing pause. A program can safely be
sent twice, because it has no effect outside its sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes.base import (
    NO_LIMITS,
    Capability,
    ExecResult,
    Program,
    ProgramEnd,
    SandboxFailed,
    SandboxLimits,
    Workspace,
    refuse_user,
)
from rollflow.tasks.sandboxes.config import MIB, RunCodeSandbox
from rollflow.tasks.sandboxes.figures import KindCounter, Replacement

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two tries
START_SECONDS = 10.0  # seconds allowed for the first program
LONGEST_ANSWER = 300  # largest number of characters of a server's answer in an error message
LARGEST_ANSWER = 2**26  # largest size of an answer in bytes


class RunCodeSandboxes:
    """Creates sandboxes whose programs run on a server, one request for each program."""

    capabilities = frozenset[Capability]()

    def __init__(self, config: RunCodeSandbox) -> None:
        self._config, self._counter = config, KindCounter(config.kind)
        self._places = asyncio.Semaphore(config.at_once)
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> None:
        """Run one program on the server; see `Sandboxes.start`."""
        self._open()
        try:
            result = await self._run(Program(code="print(6 * 7)", timeout=START_SECONDS), {})
            if result.stdout != b"42\n":
                raise SandboxFailed(
                    f"the first program on the server should print 42, but printed {result.stdout!r} and the "
                    f"error output {result.stderr!r}"
                )
        except SandboxFailed as error:
            await self.close()
            raise ConfigError(f"sandbox.url = {self._config.url!r}: this server cannot run programs: {error}") from None

    async def create(self, limits: SandboxLimits = NO_LIMITS) -> RemoteSandbox:
        """Create a sandbox in this process, without a request to the server; see `Sandboxes.create`."""
        return RemoteSandbox(self)

    async def open_workspace(self, limits: SandboxLimits = NO_LIMITS) -> Workspace:
        """Raise `SandboxFailed`, because the protocol has no sessions."""
        raise SandboxFailed(
            'a server with the endpoint /run_code keeps no sessions; use sandbox.kind = "rock", or a kind that '
            'runs on this machine, such as "bubblewrap"'
        )

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Run a program on the server; see `Sandboxes.run`."""
        refuse_user(program.user)
        return await self._counter.watch(self._run(program, files or {}))

    async def _run(self, program: Program, files: Mapping[str, bytes]) -> ExecResult:
        body = build_body(program, files, self._config.memory_bytes)
        try:
            return read_answer(await self._post(body, program.timeout))
        except TooLong:  # servers of this protocol may leave a program's output unlimited
            return ExecResult(ProgramEnd.OUTPUT, -9, b"", b"", 0.0)

    async def close(self) -> None:
        """Close the connections."""
        if self._client:
            await self._client.aclose()
        self._client = None

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            headers = read_token_header(self._config.token_env)
            limits = httpx.Limits(max_connections=self._config.at_once)
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        return self._client

    async def _post(self, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, with retries until the server answers; `seconds` is the deadline of the program.

        Raises:
            SandboxFailed: the server gave no valid answer in any of the tries.
            TooLong: the server's answer has more than `LARGEST_ANSWER` bytes.
        """
        limit, pause = seconds + self._config.wait_seconds, FIRST_PAUSE
        for attempt in range(self._config.tries):
            if attempt:
                self._counter.count_replacement(Replacement.FAILED)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                async with self._places:
                    self._counter.count_start()  # the server runs each request in a new sandbox
                    status, content = await self._send(body, limit)
            except (httpx.RequestError, TimeoutError) as error:
                reason = f"no answer within {limit:g} s" if isinstance(error, TimeoutError) else f"no answer: {error}"
                continue
            if status < 500:
                return _read_json(status, content)
            reason = f"status {status}: {shorten(content.decode(errors='replace'))}"
        raise SandboxFailed(f"all {self._config.tries} tries failed (sandbox.tries), the last one with {reason}")

    async def _send(self, body: Mapping[str, Any], limit: float) -> tuple[int, bytes]:
        """Send a request; return status and content of the answer, which must end within `limit` seconds."""
        with self._counter.use():
            async with asyncio.timeout(limit), self._open().stream("POST", self._config.url, json=body) as answer:
                return answer.status_code, await _read_content(answer)


class RemoteSandbox:
    """A sandbox that consists of files in this process's memory, which are sent to the server with each program."""

    def __init__(self, sandboxes: RunCodeSandboxes) -> None:
        self._sandboxes = sandboxes
        self._files: dict[str, bytes] = {}
        self._is_closed = False

    async def exec(self, program: Program) -> ExecResult:
        """Run a program with the uploaded files; see `Sandbox.exec`."""
        self._check()
        refuse_user(program.user)
        try:
            return await self._sandboxes.run(program, self._files)
        except BaseException:
            self._is_closed = True
            raise

    async def upload(self, path: str, data: bytes) -> None:
        """Store a file in memory, to be sent with each later program; see `Sandbox.upload`."""
        self._check()
        self._files[path] = data

    async def download(self, path: str) -> bytes:
        """Raise `SandboxFailed`, because the server keeps no files that a program wrote."""
        raise SandboxFailed(
            f"{path!r} cannot be downloaded, because this server deletes the files of a program at its end"
        )

    async def close(self) -> None:
        """Delete the files from memory."""
        self._is_closed = True
        self._files.clear()

    def _check(self) -> None:
        if self._is_closed:
            raise SandboxFailed("the sandbox is closed, so it runs no more programs")


def read_token_header(name: str) -> dict[str, str]:
    """Return the HTTP header with the token in the environment variable `name`; return {} if `name` is empty.

    Raises:
        ConfigError: the environment variable is not set.
    """
    if not name:
        return {}
    if not (token := os.environ.get(name)):
        raise ConfigError(f"sandbox.token_env = {name!r}: this variable is not set; set it to the token")
    return {"Authorization": f"Bearer {token}"}


def build_body(program: Program, files: Mapping[str, bytes], memory_bytes: int) -> dict[str, Any]:
    """Return the JSON body of the request that runs a program.

    Raises:
        SandboxFailed: the protocol cannot express the program.
    """
    if program.channel is not None or program.keep_children:
        raise SandboxFailed(
            "a server with the endpoint /run_code gives a program no channel, and ends all of its processes; use "
            "another kind of sandbox"
        )
    try:
        stdin = program.stdin.decode()
    except UnicodeDecodeError:
        raise SandboxFailed(
            "the input of the program (stdin) is not UTF-8, but the protocol of /run_code carries only text"
        ) from None
    return {
        "code": _shell_code(program) if program.command else wrap_python(program),
        "language": "bash" if program.command else "python",
        "run_timeout": program.timeout,
        "compile_timeout": program.timeout,
        "memory_limit_MB": memory_bytes // MIB,
        "stdin": stdin,
        "files": {path: base64.b64encode(data).decode() for path, data in files.items()},
        "fetch_files": [],
    }


def read_answer(answer: Mapping[str, Any]) -> ExecResult:
    """Return the result of a program from the server's answer.

    Raises:
        SandboxFailed: the answer does not contain the program's result.
    """
    run = answer.get("run_result")
    if answer.get("status") not in ("Success", "Failed") or not isinstance(run, Mapping):
        raise SandboxFailed(
            f"the server answered with the status {answer.get('status')!r} instead of a result: "
            f"{shorten(str(answer.get('message', '')))}"
        )
    stdout, stderr = (str(run.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
    seconds = run.get("execution_time")
    seconds = float(seconds) if isinstance(seconds, float) else 0.0
    if run.get("status") == "TimeLimitExceeded":
        return ExecResult(ProgramEnd.TIMEOUT, -9, stdout, stderr, seconds)
    if run.get("status") != "Finished" or type(run.get("return_code")) is not int:
        raise SandboxFailed(
            f"the server could not run the program (status {run.get('status')!r}): {shorten(str(run.get('stderr')))}"
        )
    return ExecResult(ProgramEnd.EXITED, run["return_code"], stdout, stderr, seconds)


def _shell_code(program: Program) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in program.env.items()]
    command = shlex.join(["env", *variables, *program.command] if variables else program.command)
    return f'export HOME="$PWD"\ncd {shlex.quote(program.cwd)} || exit 127\nexec {command}\n'


def wrap_python(program: Program) -> str:
    """Return Python source that sets the program's name, arguments, environment variables and folder, and then runs the
    program.
    """
    order = {"code": program.code, "name": program.name, "arguments": list(program.arguments)}
    before = f"os.environ.update({{'HOME': os.getcwd(), **{dict(program.env)!r}}})\nos.chdir({program.cwd!r})"
    return f"{_read_start()}\n{before}\nrun_source({order!r})\n"


@cache
def _read_start() -> str:
    """Return the source of the module `host.program` without the call of `main`."""
    text = (Path(__file__).parent / "host" / "program.py").read_text()
    return text.partition('\nif __name__ == "__main__"')[0]


class TooLong(Exception):
    """Raised if the server's answer has more than `LARGEST_ANSWER` bytes."""


async def _read_content(answer: httpx.Response) -> bytes:
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > LARGEST_ANSWER:
            raise TooLong
    return bytes(content)


def _read_json(status: int, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if status != 200 or not isinstance(found, dict):
        text = shorten(content[: 4 * LONGEST_ANSWER].decode(errors="replace"))
        raise SandboxFailed(f"the server answered with status {status}: {text}")
    return found


def shorten(text: str) -> str:
    """Shorten a server's answer for an error message."""
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}..."
