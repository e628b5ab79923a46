"""Runs programs in sandboxes for the requests `POST /run_code` of SandboxFusion's protocol.

Requests and answers have SandboxFusion's format, so its clients work without changes. Each request runs in a new
sandbox, which is closed before the answer is sent.
"""

from __future__ import annotations

import base64
import binascii
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollflow.tasks.sandboxes.base import (
    Capability,
    ExecResult,
    Program,
    ProgramEnd,
    Sandbox,
    Sandboxes,
    SandboxFailed,
    SandboxLost,
)

MIB = 2**20
COMPILER = "g++"
COMPILE = (COMPILER, "-std=c++17", "-O2", "main.cpp", "-o", "main", "-lpthread")
WITHIN = 'ulimit -v "$0"; exec "$@"'  # shell script that limits the address space and then becomes the command
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class RunCodeRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="ignore")

    code: str
    language: str
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)


class CommandRunResult(BaseModel):
    """The result of one command, either the compiler or the program."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """The body of an answer.

    `status` is "Success" if every command returned 0, and "Failed" if a command returned another number. If the sandbox
    failed or the request is invalid, `status` is "SandboxError", and `message` gives the reason.
    """

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Language:
    """The commands that compile and run a program of one language.

    If `file` is empty, the language is Python, and the program runs in an interpreter that is already started.
    """

    run: tuple[str, ...] = ()
    file: str = ""
    compile: tuple[str, ...] = ()
    exists: Callable[[], bool] = field(default=lambda: True)


LANGUAGES: Mapping[str, Language] = {
    "python": Language(),
    "bash": Language(("bash", "main.sh"), "main.sh"),
    "cpp": Language(("./program",), "main.cpp", COMPILE, lambda: shutil.which(COMPILER) is not None),
}


def list_languages() -> list[str]:
    """Return the names of the programming languages that this machine can run."""
    return [name for name, language in LANGUAGES.items() if language.exists()]


async def run_code(sandboxes: Sandboxes, request: RunCodeRequest, memory_bytes: int) -> RunCodeResponse:
    """Run a request's program; `memory_bytes` is the memory limit of a sandbox, which the request may lower."""
    if request.language not in list_languages():
        known = ", ".join(list_languages())
        return _refuse(f"language = {request.language!r} cannot be run here; use one of {known}")
    language = LANGUAGES[request.language]
    limit = request.memory_limit_MB * MIB if 0 < request.memory_limit_MB * MIB < memory_bytes else 0
    try:
        files = {
            path: base64.b64decode(data, validate=True) for path, data in request.files.items() if data is not None
        }
        sandbox = await sandboxes.create()
        try:
            for path, content in files.items():
                await sandbox.upload(path, content)
            return await _run_in(sandbox, language, request, limit)
        finally:
            await sandbox.close()
    except binascii.Error as error:
        return _refuse(f"files: the content of a file is not valid base64: {error}")
    except OSError as error:
        return _refuse(f"files: {error.filename!r} cannot be written: {error.strerror}")
    except SandboxLost as error:
        if Capability.ISOLATION in sandboxes.capabilities:
            return _refuse(f"the sandbox failed: {error}")
        killed = CommandRunResult(status="Finished", return_code=-9, stderr=f"the sandbox ended: {error}\n")
        return RunCodeResponse(status="Failed", run_result=killed)
    except SandboxFailed as error:
        return _refuse(f"the sandbox failed: {error}")


async def _run_in(sandbox: Sandbox, language: Language, request: RunCodeRequest, limit: int) -> RunCodeResponse:
    stdin = (request.stdin or "").encode()
    compiled = None
    if language.file:
        await sandbox.upload(language.file, request.code.encode())
    if language.compile:
        compiled = _describe(await sandbox.exec(Program(command=language.compile, timeout=request.compile_timeout)))
        if compiled.status != "Finished" or compiled.return_code:
            return RunCodeResponse(status="Failed", compile_result=compiled)
        # An upload makes the compiled program executable, which a compiler cannot do in some kinds of sandbox.
        await sandbox.upload("program", await sandbox.download("main"))
    program = Program(code=request.code, stdin=stdin, timeout=request.run_timeout)
    if language.file or limit:
        command = language.run or ("python3", "-X", "utf8", "main.py")
        if not language.file:
            await sandbox.upload("main.py", request.code.encode())
        within = ("sh", "-c", WITHIN, str(limit // 1024)) if limit else ()
        program = Program(command=(*within, *command), stdin=stdin, timeout=request.run_timeout)
    found = await sandbox.exec(program)
    return RunCodeResponse(
        status="Success" if found.succeeded else "Failed",
        compile_result=compiled,
        run_result=_describe(found),
        files=await _fetch(sandbox, request.fetch_files),
    )


async def _fetch(sandbox: Sandbox, paths: list[str]) -> dict[str, str]:
    """Return the requested files that the program wrote, as base64; skip files that cannot be read."""
    found = {}
    for path in paths:
        try:
            found[path] = base64.b64encode(await sandbox.download(path)).decode()
        except OSError:
            continue
    return found


def _describe(found: ExecResult) -> CommandRunResult:
    timed_out, stderr = found.end is ProgramEnd.TIMEOUT, found.stderr.decode(errors="replace")
    if found.end not in (ProgramEnd.TIMEOUT, ProgramEnd.EXITED):
        stderr += f"\nkilled, because it exceeded the limit of its sandbox: {found.end}\n"
    return CommandRunResult(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=found.seconds,
        return_code=None if timed_out else found.return_code,
        stdout=found.stdout.decode(errors="replace"),
        stderr=stderr,
    )


def _refuse(message: str) -> RunCodeResponse:
    return RunCodeResponse(status="SandboxError", message=message)
