"""Answers the HTTP requests of ROCK's protocol, version 1, below the path `/apis/envs/sandbox/v1`.

Requests and answers have ROCK's format, so ROCK's SDK `rl-rock` works without changes. As in ROCK, a failed request has
HTTP status 200, the status "Failed" and a reason. A path in a request can name any file that a program in the sandbox
can reach.

As in ROCK, a command that takes too long has the exit code -1; the additional key `end` of a result says why a command
ended.
"""

from __future__ import annotations

import codecs
import math
import re
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from rollflow.tasks.sandboxes.base import Program, ProgramEnd, SandboxFailed, SandboxLimits, SessionKind
from rollflow.tasks.sandboxes.server.callers import TooLarge, TooSlow, read_body, refuse_caller
from rollflow.tasks.sandboxes.server.live import (
    LiveSandbox,
    LiveSandboxes,
    NoRoom,
    Refused,
    find_session,
    open_session,
)
from rollflow.tasks.sandboxes.server.rock_requests import (
    LONGEST_COMMAND,
    CreateSessionRequest,
    ExecuteRequest,
    ReadRequest,
    RockRequest,
    RunRequest,
    SandboxRequest,
    SessionRequest,
    StartRequest,
    WriteRequest,
)

PREFIX = "/apis/envs/sandbox/v1"
BAD_REQUEST, SERVER_ERROR, COMMAND_ERROR = 4000, 5000, 6000  # ROCK's error codes
LONGEST_CLEAR = 24 * 60  # largest number of minutes without a request before a sandbox is stopped
SMALLEST_MEMORY = 32 * 2**20
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
SESSION_KINDS = {"bash": SessionKind.SHELL, "python": SessionKind.PYTHON}  # ROCK itself has only bash
FORM_BYTES = 2**20  # largest size in bytes of a form field in an upload
Result = dict[str, Any]
Body = TypeVar("Body", bound=RockRequest)


@dataclass(frozen=True)
class BodyLimits:
    """The largest size of a request's body in bytes, and the seconds within which the body must arrive."""

    most: int
    seconds: float

    async def read(self, request: Request) -> bytes:
        """Read a body; see `read_body`."""
        return await read_body(request, self.most, self.seconds)


class CommandFailed(Exception):
    """Raised if a command in a session failed and the request asks for an error; `result` is the command's result."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


class RockService:
    """Executes the requests of ROCK's protocol."""

    def __init__(self, live: LiveSandboxes) -> None:
        self._live = live

    async def start(self, body: StartRequest) -> Result:
        """Start a sandbox; the image in the request is ignored."""
        if body.image_os.casefold() != "linux" or body.num_gpus:
            raise Refused("this server has only Linux sandboxes without a GPU; ask for one without num_gpus")
        memory = read_size("memory", body.memory)
        if memory < SMALLEST_MEMORY:
            raise Refused(f"memory = {body.memory!r} is too small for a sandbox; give at least 32m")
        limits = SandboxLimits(
            memory_bytes=memory,
            folder_bytes=read_size("disk", body.disk) if body.disk else None,
            cores=math.ceil(min(body.limit_cpus or body.cpus, 1e6)),
        )
        minutes = body.auto_clear_time_minutes if body.auto_clear_time is None else body.auto_clear_time
        described = body.model_dump(include={"image", "memory", "cpus", "disk"})
        live = await self._live.start(body.sandbox_id, limits, described, 60.0 * min(minutes, LONGEST_CLEAR))
        return {"sandbox_id": live.identity, "host_name": "localhost", "host_ip": "127.0.0.1"} | described

    async def execute(self, body: ExecuteRequest) -> Result:
        """Run a command; if the command is a string, bash runs it."""
        command = ["bash", "-c", body.command] if isinstance(body.command, str) else body.command
        if not command:
            raise Refused("command = [] names no program to run; give at least the program")
        if body.shell and not isinstance(body.command, str):
            command = ["sh", "-c", *body.command]
        seconds = min(body.timeout or LONGEST_COMMAND, LONGEST_COMMAND)
        program = Program(
            command=command,
            env=body.env or {},
            cwd=body.cwd or ".",
            timeout=seconds,
            keep_children=body.keep_children,
        )
        async with self._live.use(body.sandbox_id) as live:
            found = await live.workspace.exec(program)
        stdout, stderr = (part.decode(errors="backslashreplace") for part in (found.stdout, found.stderr))
        result = {"stdout": stdout, "stderr": stderr, "exit_code": found.return_code, "end": found.end}
        if found.end is ProgramEnd.TIMEOUT:
            return result | {
                "exit_code": -1,
                "failure_reason": f"Timeout ({seconds:g}s) exceeded while running command",
            }
        if body.check and found.return_code != 0:
            reason = f"Command {body.command!r} failed with exit code {found.return_code}"
            return result | {"exit_code": -1, "failure_reason": f"{body.error_msg}: {reason}".lstrip(": ")}
        return result

    async def create_session(self, body: CreateSessionRequest) -> Result:
        """Open a session, and wait until its process has started."""
        if body.session_type not in SESSION_KINDS:
            raise Refused(f'session_type = {body.session_type!r} is unknown; use "bash" or "python"')
        start = [f"source {shlex.quote(path)}" for path in body.startup_source]
        async with self._live.use(body.sandbox_id) as live:
            await check_user(live, body.remote_user or "")
            kind = SESSION_KINDS[body.session_type]
            await open_session(live, body.session, kind, body.env or {}, start)
            found = await find_session(live, body.session).run("", max(body.startup_timeout, 10.0))
            if found.lost:
                live.sessions.pop(body.session, None)
                raise CommandFailed(f"session {body.session} did not start: {found.lost}", {"exit_code": -1})
        return {"output": show(found.output), "session_type": body.session_type}

    async def run_in_session(self, body: RunRequest) -> Result:
        """Run a command in a session; if `check` is "raise", a nonzero exit code fails the request."""
        if body.is_interactive_command or body.is_interactive_quit or body.expect:
            raise Refused("sessions of this server have no terminal, so they run no interactive commands")
        seconds = min(body.timeout or LONGEST_COMMAND, LONGEST_COMMAND)
        async with self._live.use(body.sandbox_id) as live:
            found = await find_session(live, body.session).run(body.command, seconds)
        output, lost = show(found.output), f"; {found.lost}; the next command runs in a new one" if found.lost else ""
        result = {"output": output, "exit_code": found.return_code, "session_type": "bash", "expect_string": ""}
        result |= {"end": found.end, "lost": found.lost}
        if found.end is not ProgramEnd.EXITED:
            limit = (
                f"{found.end} after {seconds:g} seconds" if found.end is ProgramEnd.TIMEOUT else f"limit: {found.end}"
            )
            raise CommandFailed(f"{limit} while running command {body.command!r}{lost}", result)
        if body.check == "raise" and found.return_code != 0:
            reason = f"Command {body.command!r} failed with exit code {found.return_code}{lost}. Here is the output:"
            raise CommandFailed(f"{body.error_msg}: {reason}\n{output!r}".lstrip(": "), result)
        if body.check == "ignore":
            result["exit_code"] = None
        return result | {"failure_reason": lost.lstrip("; ")}

    async def close_session(self, body: SessionRequest) -> Result:
        """Close a session."""
        async with self._live.use(body.sandbox_id) as live:
            session = find_session(live, body.session)
            live.sessions.pop(body.session, None)
            await session.close()
        return {"session_type": "bash"}

    async def read_file(self, body: ReadRequest) -> Result:
        """Read a text file."""
        async with self._live.use(body.sandbox_id) as live:
            data = await live.workspace.download(body.path)
        try:
            if not codecs.lookup(body.encoding or "utf-8")._is_text_encoding:
                raise LookupError(f"{body.encoding!r} is not an encoding of text")
            content = data.decode(body.encoding or "utf-8", body.errors or "strict")
            content.encode()
        except (LookupError, UnicodeError) as error:
            raise Refused(f"{body.path!r} cannot be read as text: {error}") from None
        return {"content": content}

    async def write_file(self, body: WriteRequest) -> Result:
        """Write a text file."""
        return await self.store(body.sandbox_id, body.path, body.content.encode())

    async def store(self, sandbox_id: str, path: str, data: bytes) -> Result:
        """Write a file."""
        async with self._live.use(sandbox_id) as live:
            await live.workspace.upload(path, data)
        return {"success": True, "message": "", "file_name": path.rpartition("/")[2]}

    async def stop(self, body: SandboxRequest) -> str:
        """Stop a sandbox; do nothing if no running sandbox has this id."""
        await self._live.stop(body.sandbox_id)
        return f"{body.sandbox_id} stopped"

    async def delete(self, body: SandboxRequest) -> str:
        """Forget a stopped sandbox; as in ROCK, an unknown id is accepted, and a running sandbox is rejected."""
        if await self._live.is_alive(body.sandbox_id):
            raise Refused(f"sandbox {body.sandbox_id!r} is running; stop it first")
        self._live.forget(body.sandbox_id)
        return f"{body.sandbox_id} deleted"

    async def restart(self, body: SandboxRequest) -> Result:
        """Kill all processes of a running sandbox and keep its files; reject a stopped sandbox, whose files are
        deleted.
        """
        if self._live.find_ended(body.sandbox_id):
            raise Refused(f"sandbox {body.sandbox_id!r} was stopped, and its files are deleted; start another one")
        async with self._live.use(body.sandbox_id) as live:
            live.sessions.clear()
            await live.workspace.end_processes()
            return {"sandbox_id": live.identity, "host_name": "localhost", "host_ip": "127.0.0.1", **live.described}

    async def describe(self, identity: str, *, with_ended: bool) -> Result:
        """Return the state of a sandbox; stopped sandboxes are found only if `with_ended` is true."""
        alive = await self._live.is_alive(identity)
        ended = self._live.find_ended(identity) if with_ended else None
        live: LiveSandbox = ended or self._live.find(identity)
        stage = {"status": "success" if alive else "stopped", "message": ""}
        created = datetime.fromtimestamp(live.created, UTC).isoformat()
        return {
            "sandbox_id": identity,
            "status": {"sandbox": stage},
            "state": "running" if alive else "stopped",
            "is_alive": alive,
            "port_mapping": {},
            "host_name": "localhost",
            "host_ip": "127.0.0.1",
            "create_time": created,
            "start_time": created,
            "state_history": [],
            **live.described,
        }


async def check_user(live: LiveSandbox, user: str) -> None:
    """Check that the programs of a sandbox run as this user, given by name or number; "" means any user.

    Raises:
        Refused: the programs run as another user.
    """
    if not user:
        return
    found = await live.workspace.exec(Program(command=["sh", "-c", "id -u; id -un 2>&-"], keep_children=True))
    own = found.stdout.decode(errors="replace").split()
    if user not in own:
        shown = f"user {own[0]}" if own else "another user"
        raise Refused(
            f"remote_user = {user!r}: all programs of a sandbox of this server run as {shown}; leave out the key"
        )


def show(output: bytes) -> str:
    """Return output in the format of ROCK's sessions: as text without leading and trailing whitespace."""
    return output.decode(errors="backslashreplace").strip()


def read_size(name: str, text: str) -> int:
    """Parse a size such as 512m or 8g as bytes; raise `Refused` if the text is not a size."""
    if (found := SIZE.fullmatch(text.strip())) is None or not (size := float(found[1])) < 2**40:
        raise Refused(f"{name} = {text!r} is not a size; write for example 512m or 8g")
    return int(size * 2 ** UNITS[found[2].lower()])


def add_rock_routes(app: FastAPI, live: LiveSandboxes, token: str | None, limits: BodyLimits) -> None:
    """Add the routes of ROCK's protocol to an HTTP application."""
    service = RockService(live)

    def add(path: str, model: type[Body], action: Callable[[Body], Awaitable[Any]]) -> None:
        async def answer(request: Request) -> JSONResponse:
            async def do() -> Any:
                return await action(model.model_validate_json(await limits.read(request)))

            return await envelop(request, token, do)

        app.post(PREFIX + path)(answer)

    for path in ("/start_async", "/start"):
        add(path, StartRequest, service.start)
    add("/execute", ExecuteRequest, service.execute)
    add("/create_session", CreateSessionRequest, service.create_session)
    add("/run_in_session", RunRequest, service.run_in_session)
    add("/close_session", SessionRequest, service.close_session)
    add("/read_file", ReadRequest, service.read_file)
    add("/write_file", WriteRequest, service.write_file)
    add("/stop", SandboxRequest, service.stop)
    add("/delete", SandboxRequest, service.delete)
    add("/restart", SandboxRequest, service.restart)

    @app.post(PREFIX + "/upload")
    async def upload(request: Request) -> JSONResponse:
        async def do() -> Any:
            identity, path, data = await read_upload(request, limits)
            return await service.store(identity, path, data)

        return await envelop(request, token, do)

    @app.get(PREFIX + "/get_status")
    async def get_status(request: Request, sandbox_id: str, include_all_states: bool = False) -> JSONResponse:
        return await envelop(request, token, lambda: service.describe(sandbox_id, with_ended=include_all_states))

    @app.get(PREFIX + "/is_alive")
    async def is_alive(request: Request, sandbox_id: str) -> JSONResponse:
        async def do() -> Any:
            alive = await live.is_alive(sandbox_id)
            return {"is_alive": alive, "message": "localhost" if alive else f"sandbox {sandbox_id} does not live"}

        return await envelop(request, token, do)


async def read_upload(request: Request, limits: BodyLimits) -> tuple[str, str, bytes]:
    """Parse an upload request; return the sandbox's id, the file's path and the file's content."""

    async def parts() -> AsyncGenerator[bytes, None]:
        yield await limits.read(request)

    try:
        form = await MultiPartParser(request.headers, parts(), max_files=1, max_part_size=FORM_BYTES).parse()
    except (MultiPartException, KeyError) as error:
        raise Refused(f"the body of the request is not a multipart form: {error}") from None
    try:
        file, path, identity = form.get("file"), form.get("target_path"), form.get("sandbox_id")
        if not isinstance(file, UploadFile) or not isinstance(path, str) or not isinstance(identity, str) or not path:
            raise Refused("an upload must be a form with the parts file, target_path and sandbox_id")
        return identity, path, await file.read()
    finally:
        await form.close()


async def envelop(request: Request, token: str | None, do: Callable[[], Awaitable[Any]]) -> JSONResponse:
    """Answer a request in ROCK's format; without the server's token, the request is rejected before its body is
    read."""
    if refused := refuse_caller(request, token):
        return JSONResponse(describe_failure(BAD_REQUEST, refused.reason), refused.status, refused.headers)
    try:
        return JSONResponse({"status": "Success", "message": None, "error": None, "result": await do()})
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False))
        return JSONResponse(describe_failure(BAD_REQUEST, "; ".join(wrong)))
    except CommandFailed as error:
        return JSONResponse(describe_failure(COMMAND_ERROR, str(error), error.result))
    except OSError as error:
        return JSONResponse(describe_failure(BAD_REQUEST, f"{error.filename!r}: {error.strerror}"))
    except (Refused, TooLarge, TooSlow) as error:
        return JSONResponse(describe_failure(BAD_REQUEST, str(error)))
    except ClientDisconnect:
        return JSONResponse(describe_failure(BAD_REQUEST, "the caller is gone"), 400)
    except (NoRoom, SandboxFailed) as error:
        return JSONResponse(describe_failure(SERVER_ERROR, str(error)))


def describe_failure(code: int, reason: str, result: Result | None = None) -> Result:
    """Return the answer to a failed request in ROCK's format."""
    found = {**(result or {}), "code": code, "failure_reason": reason}
    return {"status": "Failed", "message": reason, "error": reason, "result": found}
