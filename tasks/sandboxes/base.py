"""The interface of all kinds of sandbox. A sandbox runs a program that the model wrote, and limits what the program can
do.

* At its deadline, a program is killed with all its child processes.
* A sandbox limits memory, processes, open files, stored bytes and output, even if its programs run as root.
* A new sandbox has an empty folder, which is the HOME of its programs.
* Closing a sandbox kills all processes that were started in the sandbox.
* `ExecResult` describes how a program ended; a failure of the sandbox itself raises `SandboxFailed`.

A `Capability` is a feature that only some kinds of sandbox have.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rollflow.storage.errors import RollflowError

MAIN = "main.py"  # default file name of a program given as Python source, shown in tracebacks
NO_VARIABLES: Mapping[str, str] = {}


class SandboxFailed(RollflowError):
    """Raised if a sandbox failed, so that the result of the program is unknown. The caller should run the program again
    in a new sandbox.
    """


class SandboxLost(SandboxFailed):
    """Raised if a sandbox ended, or stopped answering, while it ran a program. Without isolation, the program itself
    may have ended the sandbox.
    """


class UserRefused(SandboxFailed):
    """Raised if a sandbox cannot run programs as the requested user. Other sandboxes of the same kind would reject the
    user, too."""


class Capability(StrEnum):
    """A feature that only some kinds of sandbox have."""

    # a program can reach no network, no content of a host file and no process outside the sandbox
    ISOLATION = "isolation"
    HIDDEN_HOST = "hidden host"  # a program cannot find out which files and processes the host has
    # the kernel enforces the size limit of the folder; without this capability, the size is measured at intervals
    EXACT_FOLDER_LIMIT = "exact folder limit"
    # `ExecResult.end` names the exceeded limit; without this capability, it only says that the program was killed
    NAMED_LIMITS = "named limits"
    STATE = "state"  # files that a program wrote remain in the sandbox
    CHANNEL = "channel"  # a program can receive a socket (`Program.channel`)
    CHILDREN = "children"  # child processes may outlive their program (`Program.keep_children`)
    SESSIONS = "sessions"  # sandboxes can have sessions (see `Sandboxes.open_workspace`)
    # a program or a session can run as another user of the sandbox
    USERS = "users"


class ProgramEnd(StrEnum):
    """Why a program ended."""

    EXITED = "exited"  # the program ended by itself or by a signal that it sent to itself
    TIMEOUT = "timeout"  # killed at its deadline
    MEMORY = "memory"  # the program was killed because its processes used too much memory
    PROCESSES = "processes"  # the program was killed because it started too many processes
    OUTPUT = "output"  # the program was killed because it wrote too much to stdout or stderr
    FOLDER = "folder"  # the program was killed because it stored too many bytes or files


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a program in a sandbox.

    `return_code` is negative if a signal ended the program. `seconds` is the time from the start of the program to its
    end.
    """

    end: ProgramEnd
    return_code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        """True if the program ended by itself with return code 0."""
        return self.end is ProgramEnd.EXITED and self.return_code == 0


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run in a sandbox.

    A program is a command (`command`), or Python source (`code`), which runs in a fork of an interpreter with common
    modules. The program gets the socket `channel` as file descriptor 3; only sandboxes with the capability CHANNEL
    accept a channel. The caller's copy of `channel` is closed, so that the other end is notified when the program ends.

    The program runs as `user`, or as the sandbox's own user; only sandboxes with the capability USERS accept a user. A
    program with a user starts in the folder of the user, which is in the sandbox's folder and is the program's HOME.
    """

    command: Sequence[str] = ()
    code: str = ""
    name: str = MAIN
    arguments: Sequence[str] = ()
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=lambda: NO_VARIABLES)
    cwd: str = "."
    timeout: float = 10.0  # seconds
    channel: socket.socket | None = None
    keep_children: bool = False  # if True, child processes may outlive the program
    user: str = ""  # name of a user; "": the sandbox's own user


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits for one sandbox that are stricter than the config; None means the limit in the config."""

    memory_bytes: int | None = None
    folder_bytes: int | None = None
    cores: int | None = None  # number of CPU cores; only sandboxes with the capability ISOLATION enforce it


NO_LIMITS = SandboxLimits()


def refuse_user(user: str) -> None:
    """Raise `UserRefused` unless `user` is empty; for sandboxes without the capability USERS."""
    if user:
        raise UserRefused(
            f"user = {user!r}: all programs of this kind of sandbox run as one user; leave out the user, or use "
            'sandbox.kind = "rock" with a server whose sandboxes have several users'
        )


class SessionKind(StrEnum):
    """The language that a session understands."""

    SHELL = "shell"  # bash
    PYTHON = "python"  # Python; the value of a final expression is printed, as in a notebook


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The result of running one piece of code in a session.

    `output` is stdout and stderr in the order of writing, including the output of background processes that earlier
    runs started. `return_code` is the exit code of the last command of a shell; in Python, 0 means success and 1 an
    error. `lost` is "" if the session kept its state (variables, working folder, functions); otherwise it is the reason
    why the state was lost. After a loss, the files remain, and the next run starts a new session.
    """

    end: ProgramEnd
    return_code: int
    output: bytes
    seconds: float
    lost: str = ""


class Sandbox(Protocol):
    """One sandbox, which runs one program at a time."""

    async def exec(self, program: Program) -> ExecResult:
        """Run a program and wait for its end.

        Raises:
            SandboxFailed: the sandbox is closed.
            SandboxLost: the sandbox failed while the program ran.
            UserRefused: the sandbox cannot run programs as `Program.user`; the program did not start.
        """

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file; `path` is relative to the sandbox's folder. Missing folders are created.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
            OSError: no file can be written at `path`.
        """

    async def download(self, path: str) -> bytes:
        """Read a file; `path` is relative to the sandbox's folder.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
            OSError: the file cannot be read, is not a regular file, or is larger than the limit on the sandbox's
            folder.
        """

    async def close(self) -> None:
        """Kill all processes in the sandbox and delete its files."""


class SandboxSession(Protocol):
    """A shell or a Python interpreter that keeps its state between runs and runs one piece of code at a time."""

    async def run(self, code: str, timeout: float = 10.0) -> SessionResult:
        """Run code and wait for its end, but not for the background processes that it starts.

        A run that exceeds `timeout` seconds or the limit of output is interrupted as by Ctrl-C, and `SessionResult.end`
        names the limit. A session that does not stop after the interrupt is killed, and `SessionResult.lost` gives the
        reason. All sessions end if the sandbox exceeds its limit of memory or processes.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
        """

    async def close(self) -> None:
        """Kill the session and its child processes, except those that have detached from it."""


class Workspace(Protocol):
    """A sandbox for an agent's tools, in which sessions and commands run in parallel on the same files.

    Programs in a workspace are not protected from each other. Paths may be absolute, as programs in the sandbox see
    them. A workspace reads and writes only files that the programs in the sandbox can reach.
    """

    async def open_session(
        self, kind: SessionKind = SessionKind.SHELL, env: Mapping[str, str] = NO_VARIABLES, *, user: str = ""
    ) -> SandboxSession:
        """Open a session that runs as `user` (see `Program.user`). The process of the session starts with its first
        run.

        Raises:
            SandboxFailed: the sandbox is closed, or does not support sessions of this kind.
            UserRefused: the sandbox cannot run programs as this user.
        """

    async def exec(self, program: Program) -> ExecResult:
        """Run a command in parallel with the sessions; the program must have neither `Program.code` nor
        `Program.channel`.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
        """

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.upload`."""

    async def download(self, path: str) -> bytes:
        """Read a file; see `Sandbox.download`."""

    async def is_alive(self) -> bool:
        """Return whether the sandbox still answers."""

    async def close(self) -> None:
        """Kill all processes in the sandbox and delete its files."""


class Sandboxes(Protocol):
    """Creates sandboxes of one kind."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of this kind of sandbox."""

    async def start(self) -> None:
        """Start the processes that all sandboxes share, and check with one program that sandboxes work.

        Raises:
            ConfigError: this machine cannot run this kind of sandbox; the message says why and what to change.
        """

    async def create(self, limits: SandboxLimits = NO_LIMITS) -> Sandbox:
        """Create a sandbox with an empty folder.

        Raises:
            SandboxFailed: the sandbox could not be created.
        """

    async def open_workspace(self, limits: SandboxLimits = NO_LIMITS) -> Workspace:
        """Create a sandbox with sessions for an agent's tools, for kinds with the capability SESSIONS.

        Raises:
            SandboxFailed: the sandbox could not be created, or this kind of sandbox has no sessions.
        """

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Run a program in a new sandbox that contains `files`, and close the sandbox.

        Raises:
            SandboxFailed: the sandbox failed.
            OSError: a file cannot be written at its path.
        """

    async def close(self) -> None:
        """Close all sandboxes and end the processes that all sandboxes share."""
