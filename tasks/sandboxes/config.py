"""Defines the config section `[sandbox]`, with one class for each kind of sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

MIB = 2**20


class SandboxBase(Section):
    """The config keys that most kinds of sandbox have: limits of one sandbox, and settings for all sandboxes of a
    run.
    """

    kind: str
    memory_bytes: int = Field(
        256 * MIB, ge=32 * MIB, description="memory that all processes of one sandbox may use together, in bytes"
    )
    processes: int = Field(32, ge=4, le=4096, description="largest number of processes and threads in one sandbox")
    open_files: int = Field(256, ge=32, le=65536, description="largest number of open files of one process")
    folder_bytes: int = Field(64 * MIB, ge=MIB, description="largest size of all files in a sandbox's folder, in bytes")
    folder_files: int = Field(4096, ge=64, description="largest number of files in a sandbox's folder")
    output_bytes: int = Field(
        MIB,
        ge=1024,
        description="largest number of bytes that a program may write to stdout, and separately to stderr",
    )
    start_seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the start of the processes that create the sandboxes",
    )
    spares: int = Field(
        4,
        ge=0,
        le=256,
        description="number of empty sandboxes that are kept ready, so that a program starts sooner. If the number is "
        "0, a new sandbox is created for each program",
    )


class BubblewrapSandbox(SandboxBase):
    kind: Literal["bubblewrap"] = Field(
        "bubblewrap", description="sandboxes of Linux namespaces, created by bwrap (Debian's package bubblewrap)"
    )
    imports: tuple[str, ...] = Field(
        (
            *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
            *("json", "math", "operator", "random", "re", "statistics", "string", "typing"),
        ),
        description="Python modules that are imported before the first program starts, so that a program imports these "
        "modules without delay",
    )


class SandlockSandbox(SandboxBase):
    kind: Literal["sandlock"] = Field(
        "sandlock",
        description="sandboxes of Landlock and seccomp by the package sandlock, which needs neither root nor "
        "namespaces",
    )


class UnsafeProcessSandbox(SandboxBase):
    kind: Literal["unsafe-process"] = Field(
        "unsafe-process",
        description="plain processes, which protect from nothing: a program can read, change and send everything that "
        "the user of the run can",
    )


class RunCodeSandbox(Section):
    kind: Literal["run-code"] = Field(
        "run-code", description="a server of SandboxFusion's protocol, for example `rollflow serve --sandboxes`"
    )
    url: str = Field(
        pattern=r"^https?://[^@\s]+$",
        description="address of the server's POST /run_code, e.g. http://127.0.0.1:8080/run_code; a URL with a user "
        "or a password is rejected",
    )
    token_env: str = Field(
        "", description="name of the environment variable with the token of the server; empty: no token is sent"
    )
    at_once: int = Field(
        16, ge=1, le=4096, description="largest number of requests to the server that run at the same time"
    )
    memory_bytes: int = Field(
        256 * MIB, ge=32 * MIB, description="largest memory of a program, in bytes; the server enforces this limit"
    )
    tries: int = Field(
        4,
        ge=1,
        le=20,
        description="largest number of times that a request is sent if the server does not answer or answers with a "
        "status of 500 or more",
    )
    wait_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds that a request may take in addition to the time of its program, for example in the "
        "server's queue",
    )


class RockSandbox(Section):
    kind: Literal["rock"] = Field(
        "rock", description="a server of ROCK's protocol, for example `rollflow serve --sandboxes` or a rocklet"
    )
    url: str = Field(
        pattern=r"^https?://[^@\s]+$",
        description="address of the server without a path, e.g. http://127.0.0.1:8080; a URL with a user or a "
        "password is rejected",
    )
    protocol: Literal["rock", "rocklet"] = Field(
        "rock",
        description="kind of server. rock: a server that starts a sandbox for each program; rocklet: a single rocklet, "
        "on whose machine all programs run, each in its own folder",
    )
    image: str = Field(
        "python:3.11",
        min_length=1,
        description="container image of a sandbox; the image must contain python3 and coreutils",
    )
    token_env: str = Field(
        "", description="name of the environment variable with the token of the server; empty: no token is sent"
    )
    memory_bytes: int = Field(
        256 * MIB, ge=32 * MIB, description="memory of a sandbox, in bytes; the server enforces this limit"
    )
    cpus: float = Field(
        1.0, gt=0, le=4096, description="number of processor cores of a sandbox; the server enforces this limit"
    )
    at_once: int = Field(16, ge=1, le=4096, description="largest number of sandboxes that run at the same time")
    tries: int = Field(
        4,
        ge=1,
        le=20,
        description="largest number of times that a program is tried if its sandbox fails or cannot be started",
    )
    start_seconds: float = Field(
        180.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for the start of a sandbox"
    )
    wait_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds that a request may take in addition to the time of its program",
    )
    clear_minutes: int = Field(
        60,
        ge=1,
        le=24 * 60,
        description="number of minutes without any request to a sandbox, after which the server stops this sandbox",
    )


ServerSandbox = RunCodeSandbox | RockSandbox  # kinds of sandbox that run on a remote server
SandboxConfig = Annotated[
    BubblewrapSandbox | SandlockSandbox | UnsafeProcessSandbox | RunCodeSandbox | RockSandbox,
    Field(discriminator="kind"),
]
