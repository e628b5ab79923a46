"""Sandboxes on a ROCK server or on a rocklet.

ROCK is a sandbox service, and a rocklet is the agent that ROCK runs inside each of its sandboxes. A ROCK server starts
a sandbox for each call of `create`. A rocklet has no separate sandboxes: all programs run on its machine, each in its
own folder.

Isolation and limits are enforced only by the server. An infrastructure error raises `SandboxFailed`, after which `run`
repeats the program in a new sandbox. A killed program counts as timed out if its deadline had passed and the server
names no exceeded limit.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes.base import (
    NO_LIMITS,
    NO_VARIABLES,
    Capability,
    ExecResult,
    Program,
    ProgramEnd,
    SandboxFailed,
    SandboxLimits,
    SessionKind,
    UserRefused,
)
from rollflow.tasks.sandboxes.config import MIB, RockSandbox
from rollflow.tasks.sandboxes.figures import KindCounter, Replacement
from rollflow.tasks.sandboxes.rock_answers import read_result, read_rocklet_result
from rollflow.tasks.sandboxes.rock_session import KILLED, START_SECONDS, Answer, RequestFailed, RockSession
from rollflow.tasks.sandboxes.rock_users import PREPARE, check_name, check_prepared, limit_command
from rollflow.tasks.sandboxes.run_code import read_token_header, shorten, wrap_python

PREFIX = "/apis/envs/sandbox/v1"
# seconds after a program's deadline until the server kills the program, if `timeout` in the sandbox has not done so
GRACE_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two tries
FIRST_LOOK, LONGEST_LOOK = 0.1, 3.0  # seconds between two requests that ask if a sandbox has started
FAILED_COMMAND = -1  # exit code that reports a command that the server could not run
SIGNALED = 128
# shell script that creates a folder, enters the working folder, opens stdin and becomes the command
BEGIN = 'mkdir -p "$1" && cd "$2" && exec <"$3" || exit 127; shift 3; exec "$@"'
READ = """
import base64, os, stat, sys
try:
    fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(22, "not a regular file")
    with os.fdopen(fd, "rb") as file, open(sys.argv[2], "wb") as out:
        out.write(base64.b64encode(file.read()))
except OSError as error:
    print(error.errno)
"""
Found = TypeVar("Found")


class RockSandboxes:
    """Creates sandboxes on a server."""

    capabilities = frozenset({Capability.STATE, Capability.SESSIONS, Capability.USERS})

    def __init__(self, config: RockSandbox) -> None:
        self._config, self.counter = config, KindCounter(config.kind)
        self._places = asyncio.Semaphore(config.at_once)
        self._client: httpx.AsyncClient | None = None
        self._live: set[RockRemoteSandbox] = set()

    async def start(self) -> None:
        """Run one program on the server; see `Sandboxes.start`."""
        self._open()
        try:
            result = await self._run(Program(code="print(6 * 7)", timeout=START_SECONDS), {})
            if result.stdout.split() != [b"42"]:
                raise SandboxFailed(
                    f"the first program in a sandbox of the server should print 42, but printed {result.stdout!r} "
                    f"and the error output {result.stderr!r}"
                )
        except SandboxFailed as error:
            await self.close()
            raise ConfigError(f"sandbox.url = {self._config.url!r}: this server cannot run programs: {error}") from None

    async def create(self, limits: SandboxLimits = NO_LIMITS) -> RockRemoteSandbox:
        """Start a sandbox on the server; see `Sandboxes.create`."""
        return await self._try(lambda: self._create(limits))

    async def open_workspace(self, limits: SandboxLimits = NO_LIMITS) -> RockRemoteSandbox:
        """Start a sandbox on the server; see `Sandboxes.open_workspace`."""
        return await self.create(limits)

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Run a program in a new sandbox, and again if the sandbox fails; see `Sandboxes.run`."""
        return await self.counter.watch(self._run(program, files or {}))

    async def _run(self, program: Program, files: Mapping[str, bytes]) -> ExecResult:
        """Run a program without adding it to the counters."""

        async def once() -> ExecResult:
            sandbox = await self._create(NO_LIMITS)
            try:
                for path, data in files.items():
                    await sandbox.upload(path, data)
                return await sandbox.run(program)
            finally:
                await sandbox.close()

        return await self._try(once)

    async def close(self) -> None:
        """Stop all sandboxes, and close the connections to the server."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)))
        if self._client:
            await self._client.aclose()
        self._client = None

    async def send(self, path: str, seconds: float, body: Mapping[str, Any] | None = None, **more: Any) -> Answer:
        """Send a request without retries, and return its result; `seconds` is the time limit of the requested
        command.

        Raises:
            RequestFailed: the server answered that the request failed.
            SandboxFailed: the server did not answer in time, or its answer violates the protocol.
        """
        limit, is_rock = seconds + self._config.wait_seconds, self._config.protocol == "rock"
        url = self._config.url.rstrip("/") + (PREFIX if is_rock else "") + path
        method = "POST" if body is not None or "files" in more else "GET"
        try:
            async with asyncio.timeout(limit):
                answer = await self._open().request(method, url, json=body, **more)
        except TimeoutError:
            raise SandboxFailed(f"the server did not answer the request {path} within {limit:g} s") from None
        except httpx.TransportError as error:
            raise SandboxFailed(f"the server did not answer the request {path}: {error}") from None
        return read_result(answer) if is_rock else read_rocklet_result(answer)

    def forget(self, sandbox: RockRemoteSandbox) -> None:
        """Release the slot of a sandbox, so that another sandbox can be started."""
        if sandbox in self._live:
            self._live.remove(sandbox)
            self.counter.note_use(-1)
            self._places.release()

    async def _try(self, work: Callable[[], Awaitable[Found]]) -> Found:
        pause = FIRST_PAUSE
        for attempt in range(self._config.tries):
            if attempt:
                self.counter.count_replacement(Replacement.FAILED)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                return await work()
            except UserRefused:
                raise
            except SandboxFailed as error:
                failed = error
        raise SandboxFailed(f"all {self._config.tries} tries failed (sandbox.tries), the last one because: {failed}")

    async def _create(self, limits: SandboxLimits) -> RockRemoteSandbox:
        await self._places.acquire()
        sandbox = RockRemoteSandbox(self, self._config)
        self._live.add(sandbox)
        self.counter.note_use(1)
        try:
            if self._config.protocol == "rock":
                async with asyncio.timeout(self._config.start_seconds):
                    await sandbox.start(limits)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, TimeoutError):
                reason = f"the sandbox did not start within sandbox.start_seconds = {self._config.start_seconds:g}"
                raise SandboxFailed(reason) from None
            if isinstance(error, RequestFailed):
                raise SandboxFailed(f"the server could not start a sandbox: {error}") from None
            raise
        self.counter.count_start()
        return sandbox

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            headers = read_token_header(self._config.token_env)
            limits = httpx.Limits(max_connections=None)
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        return self._client


class RockRemoteSandbox:
    """A sandbox on a ROCK server, and a workspace with sessions. Relative paths begin in the sandbox's folder."""

    def __init__(self, sandboxes: RockSandboxes, config: RockSandbox) -> None:
        self._sandboxes, self._config = sandboxes, config
        self._identity = f"rollflow-{uuid.uuid4().hex}" if config.protocol == "rocklet" else ""
        self._folder = f"/tmp/rollflow-{uuid.uuid4().hex}"
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._users = set[str]()  # users for whose programs the folders are prepared

    async def start(self, limits: SandboxLimits) -> None:
        """Start the sandbox on the server, and wait until the sandbox runs."""
        memory = min(limits.memory_bytes or self._config.memory_bytes, self._config.memory_bytes)
        body: dict[str, Any] = {
            "image": self._config.image,
            "auto_clear_time": self._config.clear_minutes,
            "auto_clear_time_minutes": self._config.clear_minutes,
            "startup_timeout": self._config.start_seconds,
            "memory": f"{memory // MIB}m",
            "cpus": limits.cores or self._config.cpus,
        }
        if limits.folder_bytes is not None:
            body["disk"] = f"{limits.folder_bytes // MIB}m"
        started = await self._sandboxes.send("/start_async", 0, body)
        self._identity, pause = str(started.get("sandbox_id") or ""), FIRST_LOOK
        while True:
            found = await self._sandboxes.send("/get_status", 0, params={"sandbox_id": self._identity})
            if found.get("is_alive"):
                return
            stages = found.get("status") or {}
            for name, stage in stages.items() if isinstance(stages, Mapping) else ():
                if stage.get("status") in ("failed", "timeout"):
                    raise SandboxFailed(
                        f"the server could not start the sandbox, because its stage {name} failed ("
                        f"{stage.get('message')})"
                    )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)

    async def exec(self, program: Program) -> ExecResult:
        """Run a program in this sandbox; see `Sandbox.exec`."""
        return await self._sandboxes.counter.watch(self.run(program))

    async def run(self, program: Program) -> ExecResult:
        """Run a program as `exec` does, without counting the program."""
        await self._prepare_user(program.user)
        if program.channel is not None:
            raise SandboxFailed(
                "a server with ROCK's protocol cannot give a program a channel; use sandboxes of this machine"
            )
        async with self._turn:
            began = time.monotonic()
            try:
                command = await self._give(program)
                body = {"command": command, "timeout": program.timeout + GRACE_SECONDS, "shell": False, "check": False}
                body |= {"keep_children": program.keep_children}
                began = time.monotonic()
                found = await self._send("/execute", program.timeout + GRACE_SECONDS, body)
            except OSError as error:
                raise SandboxFailed(
                    f"the program and its input could not be written into the sandbox: {error}"
                ) from None
            except RequestFailed as error:
                await self.close()  # the program may still be running
                if (seconds := time.monotonic() - began) >= program.timeout:
                    return ExecResult(ProgramEnd.TIMEOUT, KILLED, b"", b"", seconds)
                raise SandboxFailed(f"the server did not run the program: {error}") from None
            except BaseException:
                await self.close()
                raise
            return self._read_result(found, program, time.monotonic() - began)

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file in this sandbox; see `Sandbox.upload`."""
        await self._upload(self._place(path), data)

    async def download(self, path: str) -> bytes:
        """Read a file of this sandbox; see `Sandbox.download`."""
        out = f"{self._folder}/given/read"
        try:
            await self._upload(out, b"")
            command = ["python3", "-c", READ, self._place(path), out]
            found = await self._send("/execute", 0, {"command": command, "timeout": self._config.wait_seconds})
            if code := str(found.get("stdout", "")).strip():
                raise OSError(int(code), os.strerror(int(code)), path)
            content = await self._send("/read_file", 0, {"path": out})
            return base64.b64decode(str(content.get("content", "")), validate=True)
        except (RequestFailed, ValueError) as error:
            raise OSError(errno.EIO, str(error), path) from None

    async def open_session(
        self, kind: SessionKind = SessionKind.SHELL, env: Mapping[str, str] = NO_VARIABLES, *, user: str = ""
    ) -> RockSession:
        """Open a session; see `Workspace.open_session`. Python sessions exist only on rollflow's own server."""
        await self._prepare_user(user)
        session = RockSession(self._send, kind, env, self._find_home(user), self._sandboxes.counter, user)
        await session.open()
        return session

    async def is_alive(self) -> bool:
        """Return whether the server reports that the sandbox is alive; see `Workspace.is_alive`."""
        try:
            found = await self._sandboxes.send("/is_alive", 0, params={"sandbox_id": self._identity})
        except (RequestFailed, SandboxFailed):
            return False
        return not self._is_closed and bool(found.get("is_alive"))

    async def close(self) -> None:
        """Stop the sandbox. A server that does not answer stops the sandbox after `clear_minutes` without a request."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await asyncio.shield(self._stop())
        finally:
            self._sandboxes.forget(self)

    async def _stop(self) -> None:
        with contextlib.suppress(SandboxFailed, RequestFailed):
            if self._config.protocol == "rocklet":
                body = {"command": ["rm", "-rf", self._folder], "sandbox_id": self._identity, "timeout": 60.0}
                await self._sandboxes.send("/execute", 0, body)
            elif self._identity:
                await self._sandboxes.send("/stop", 0, {"sandbox_id": self._identity})

    async def _send(self, path: str, seconds: float, body: Mapping[str, Any]) -> Answer:
        if self._is_closed:
            raise SandboxFailed("the sandbox is closed, so it runs no more programs")
        return await self._sandboxes.send(path, seconds, {**body, "sandbox_id": self._identity})

    async def _upload(self, place: str, data: bytes) -> None:
        if self._is_closed:
            raise SandboxFailed("the sandbox is closed, so it takes no more files")
        form = {"target_path": place, "sandbox_id": self._identity}
        try:
            await self._sandboxes.send("/upload", 0, data=form, files={"file": ("file", data)})
        except RequestFailed as error:
            if not await self.is_alive():
                raise SandboxFailed(f"the sandbox has ended: {error}") from None
            raise OSError(errno.EIO, str(error), place) from None

    async def _prepare_user(self, user: str) -> None:
        """Prepare the folders for programs of a user; raise `UserRefused` if programs cannot run as this user."""
        if not user or user in self._users:
            return
        check_name(user)
        command = ["python3", "-I", "-c", PREPARE, user, f"{self._folder}/work", f"{self._folder}/given"]
        try:
            found = await self._send("/execute", 0, {"command": command, "timeout": self._config.wait_seconds})
        except RequestFailed as error:
            raise SandboxFailed(f"user = {user!r}: the sandbox cannot be prepared for the user: {error}") from None
        check_prepared(user, *(str(found.get(name) or "") for name in ("stdout", "stderr")))
        self._users.add(user)

    async def _give(self, program: Program) -> list[str]:
        """Upload a program and its stdin to the sandbox, and return the command that runs the program."""
        given, home = f"{self._folder}/given", self._find_home(program.user)
        await self._upload(f"{given}/stdin", program.stdin)
        command, cwd, source = list(program.command), self._place(program.cwd, program.user), ""
        if not command:
            source = f"{given}/main.py"
            await self._upload(source, wrap_python(program).encode())
            command, cwd = ["python3", "-X", "utf8"], home
        own = {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **program.env}
        within = limit_command(command, program.user, program.timeout, own, source)
        return ["sh", "-c", BEGIN, "sh", home, cwd, f"{given}/stdin", *within]

    def _find_home(self, user: str) -> str:
        """Return the path of the sandbox's folder, or of a user's folder in it."""
        return f"{self._folder}/work/{user}" if user else f"{self._folder}/work"

    def _place(self, path: str, user: str = "") -> str:
        return path if path.startswith("/") else f"{self._find_home(user)}/{path}"

    def _read_result(self, found: Answer, program: Program, seconds: float) -> ExecResult:
        code, end = found.get("exit_code"), str(found.get("end") or "")
        if code == FAILED_COMMAND and not end and seconds >= program.timeout:
            # The program has killed the command `timeout`, so the server killed the program at its deadline.
            end = ProgramEnd.TIMEOUT
        if not isinstance(code, int) or (code == FAILED_COMMAND and end not in list(ProgramEnd)):
            raise SandboxFailed(f"the server could not run the program: {shorten(json.dumps(found, default=str))}")
        # `timeout` reports signal n as exit code 128 + n.
        code = SIGNALED - code if SIGNALED < code <= SIGNALED + 64 else code
        stdout, stderr = (str(found.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
        if end in list(ProgramEnd) and end != ProgramEnd.EXITED:
            return ExecResult(ProgramEnd(end), KILLED, stdout, stderr, seconds)
        is_late = code == KILLED and seconds >= program.timeout
        return ExecResult(ProgramEnd.TIMEOUT if is_late else ProgramEnd.EXITED, code, stdout, stderr, seconds)
