"""The contract of sandboxes. A sandbox runs a program that the model wrote, and limits what the program can do.

For every kind of sandbox:

- At the deadline of a program, the program and all its children are killed.
- A sandbox has limits for memory, processes, open files, stored bytes and output. The limits also hold for root.
- A new sandbox begins with an empty folder, whose path is the variable HOME of each program.
- Closing a sandbox ends everything that was started in it.
- `ExecResult` separates what the program did from what the infrastructure did: if the sandbox itself fails, the error
  is `SandboxFailed`, and nothing is known about the program.

A `Capability` is an ability that only some kinds of sandbox have; `Sandboxes.capabilities` lists the capabilities of a
kind.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rollflow.storage.errors import RollflowError

MAIN = "main.py"  # default name of a warm program's file, for its traceback
NO_VARIABLES: Mapping[str, str] = {}


class SandboxFailed(RollflowError):
    """Raised if a sandbox failed. After this error nothing is known about the program, so the caller should run the
    program again in a new sandbox.
    """


class SandboxLost(SandboxFailed):
    """Raised if a sandbox ended, or gave no answer, while it ran a program. In a sandbox without isolation the program
    may be the cause.
    """


class Capability(StrEnum):
    """An ability that only some kinds of sandbox have."""

    ISOLATION = "isolation"  # a program reaches no network, no content of a host file and no process outside
    HIDDEN_HOST = "hidden host"  # a program cannot find out which files and processes the host has
    # the kernel enforces the folder's limits; without this capability the folder is measured at intervals
    EXACT_FOLDER_LIMIT = "exact folder limit"
    NAMED_LIMITS = "named limits"  # `ExecResult.end` says which limit a program exceeded; otherwise it was killed
    STATE = "state"  # files that a program wrote stay in the sandbox for the next program and for download
    CHANNEL = "channel"  # a program gets `Program.channel`
    CHILDREN = "children"  # children of a program may live on after it (`Program.keep_children`)
    SESSIONS = "sessions"  # `Sandboxes.open_workspace` works


class ProgramEnd(StrEnum):
    """Why a program ended."""

    EXITED = "exited"  # the program ended by itself, or by a signal that it sent to itself
    TIMEOUT = "timeout"  # killed at its deadline
    MEMORY = "memory"  # killed because its processes used too much memory
    PROCESSES = "processes"  # killed because it started too many processes
    OUTPUT = "output"  # killed because it wrote too much to stdout or stderr
    FOLDER = "folder"  # killed because it stored too many bytes or files


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a program did in a sandbox.

    `return_code` is negative for a program that was ended by a signal. `seconds` is the time from the start of the
    program to its end.
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

    A program is either `command`, which starts a new process, or Python source `code`, which runs in a copy of an
    interpreter that has finished its imports. The program gets the socket `channel` as descriptor 3; the sandbox closes
    its owner's copy, so the other end of the socket ends with the program. A sandbox without the capability CHANNEL
    refuses a program with a channel.
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
    keep_children: bool = False  # True: processes that the program started may live on after the program's end


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one sandbox, in addition to those of its kind; None: only those of its kind."""

    memory_bytes: int | None = None
    folder_bytes: int | None = None
    cores: int | None = None  # processor cores; a kind without the capability ISOLATION does not hold this limit


NO_LIMITS = SandboxLimits()


class SessionKind(StrEnum):
    """What a session understands."""

    SHELL = "shell"  # bash
    PYTHON = "python"  # Python; the value of the last expression is printed, as in a notebook


@dataclass(frozen=True, slots=True)
class SessionResult:
    """What one run of a session did.

    `output` is stdout and stderr in the order in which they were written; also of processes that an earlier run left in
    the background. `return_code` is what the session says: the code of the last command, or 0 or 1 for Python. `lost`
    is empty if the session keeps its state. Otherwise it says why the state is lost (variables, folder, functions); the
    files are kept, and the next run begins in a new session.
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
            SandboxLost: the sandbox failed.
        """

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file; `path` is relative to the sandbox's folder. Missing folders are created.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
            OSError: the file cannot be written there.
        """

    async def download(self, path: str) -> bytes:
        """Read a file; `path` is relative to the sandbox's folder.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
            OSError: the file cannot be read, is no regular file, or is larger than the sandbox's folder may be.
        """

    async def close(self) -> None:
        """End everything in the sandbox and remove its files."""


class SandboxSession(Protocol):
    """A shell or a Python interpreter that keeps its state from one run to the next; one run at a time."""

    async def run(self, code: str, timeout: float = 10.0) -> SessionResult:
        """Run code and wait for its end. Processes that it starts in the background live on, even over the next runs.

        A run that takes longer than `timeout` seconds, or writes more output than a program may, is interrupted as by
        Ctrl-C; the result names the limit. If the session does not stop then, it is killed, and `SessionResult.lost`
        says so. The same holds if the code ends the session, or if the sandbox's memory or processes exceed its limit,
        which ends all sessions of the sandbox.

        Raises:
            SandboxFailed: the sandbox failed, or is closed.
        """

    async def close(self) -> None:
        """End the session with everything that it started and that has not left it."""


class Workspace(Protocol):
    """A sandbox for an agent's tools: sessions, commands and files side by side, on one folder.

    Its programs are not protected from each other. A path may be absolute, as the sandbox's programs see it; a path
    reaches nothing that a program in the sandbox does not reach.
    """

    async def open_session(
        self, kind: SessionKind = SessionKind.SHELL, env: Mapping[str, str] = NO_VARIABLES
    ) -> SandboxSession:
        """Open a session. Its process starts with its first run.

        Raises:
            SandboxFailed: the sandbox is closed, or has no sessions of this kind.
        """

    async def exec(self, program: Program) -> ExecResult:
        """Run a program that is a command beside the sessions; `Program.channel` and `code` are not allowed.

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
        """End everything in the sandbox and remove its files."""


class Sandboxes(Protocol):
    """Creates sandboxes of one kind."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of this kind."""

    async def start(self) -> None:
        """Start the processes that all sandboxes share, and run one program as a test.

        Raises:
            ConfigError: this machine cannot run this kind of sandbox; the message says why and what to change.
        """

    async def create(self, limits: SandboxLimits = NO_LIMITS) -> Sandbox:
        """Create a sandbox with an empty folder.

        Raises:
            SandboxFailed: no sandbox could be created now.
        """

    async def open_workspace(self, limits: SandboxLimits = NO_LIMITS) -> Workspace:
        """Create a sandbox for sessions; only with the capability SESSIONS.

        Raises:
            SandboxFailed: no sandbox could be created now, or this kind has no sessions.
        """

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Run a program in a sandbox of its own that holds `files`, and close that sandbox.

        Raises:
            SandboxFailed: the sandbox failed.
            OSError: a file cannot be written at its path.
        """

    async def close(self) -> None:
        """Close all sandboxes and end the processes that they share."""
