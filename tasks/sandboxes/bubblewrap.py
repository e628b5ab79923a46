"""Sandboxes of Linux namespaces: `bwrap` creates a container, called the box, and each sandbox is a set of namespaces
in the box.

The box has no network, and shows only the system's libraries and a Python interpreter, read-only (see `box.start`).

If rollflow runs as root, the box runs as user `NOBODY`. If rollflow runs as another user, `bwrap` needs a user
namespace, which some machines do not allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from rollflow.tasks.sandboxes.box.wire import CHUNK
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, SandboxBase
from rollflow.tasks.sandboxes.figures import KindCounter, Replacement
from rollflow.tasks.sandboxes.namespace_sandbox import NamespaceSandbox, send_with

NOBODY = 65534
BOX = Path(__file__).parent / "box"
IN_BOX = "/box/rollflow/tasks/sandboxes/box"
CREATE_SECONDS = 30.0
LIBRARIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/openssl.cnf", "/etc/localtime")
DEVICES = ("null", "full", "random", "urandom")
# /dev/zero is a link, because memory mapped from the real device would not count toward the memory limit
LINKS = (
    *(("/proc/self/fd", "/dev/fd"), ("/proc/self/fd/0", "/dev/stdin"), ("/proc/self/fd/1", "/dev/stdout")),
    *(("/proc/self/fd/2", "/dev/stderr"), ("full", "/dev/zero"), ("/work", "/dev/shm"), ("/work", "/tmp")),
)
PACKAGES = "/packages"  # folder of further Python packages in the box
NO_PACKAGES: Mapping[str, str] = {}
LONGEST_ERROR = 500  # largest number of characters of an error message of bwrap that is shown
LIMITS = ("memory_bytes", "processes", "open_files", "folder_bytes", "folder_files", "output_bytes")


class BoxSandboxes:
    """Creates sandboxes in a box, which is one tree of processes; a subclass defines the command that starts the
    box.
    """

    capabilities: frozenset[Capability]
    renews = False  # True if a used sandbox can be emptied for the next program

    def __init__(self, config: SandboxBase) -> None:
        self._config, self._counter = config, KindCounter(config.kind)
        self._process: asyncio.subprocess.Process | None = None
        self._box: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._numbers = 0
        # sandboxes that are ready for `run`, and tasks that create one
        self._spares: deque[NamespaceSandbox | asyncio.Task[NamespaceSandbox]] = deque()
        self._running = 0  # number of sandboxes in which `run` runs a program

    async def start(self) -> None:
        """Start the container (box), and run one program in it; see `Sandboxes.start`."""
        try:
            async with asyncio.timeout(self._config.start_seconds):
                await self._start_box()
                result = await self._run(Program(code="print(6 * 7)"), {})
            if result.stdout != b"42\n":
                raise SandboxFailed(
                    f"the first program in the sandbox should print 42, but printed {result.stdout!r} and the "
                    f"error output {result.stderr!r}"
                )
        except TimeoutError:
            await self.close()
            reason = f"it was not ready after sandbox.start_seconds = {self._config.start_seconds:g}"
            raise ConfigError(self._refusal(reason)) from None
        except SandboxFailed as error:
            await self.close()
            raise ConfigError(self._refusal(str(error))) from None

    async def create(self, limits: SandboxLimits = NO_LIMITS) -> NamespaceSandbox:
        """Create a sandbox; if the box has died, start a new box first."""
        return await self._create_in_box(limits, self._counter)

    async def _create_in_box(self, limits: SandboxLimits, counter: KindCounter | None) -> NamespaceSandbox:
        async with self._starting:
            if self._has_died():
                if self._process is not None:
                    self._counter.count_replacement(Replacement.PARENT_ENDED)
                await self._start_box()
        return await self._create(limits, counter)

    async def _create(self, limits: SandboxLimits, counter: KindCounter | None) -> NamespaceSandbox:
        """Create a sandbox; raise `SandboxFailed` if no box is running. `counter` counts the programs of the
        sandbox.
        """
        if self._box is None:
            raise SandboxFailed("no sandbox can be created, because the process that creates sandboxes has ended")
        self._numbers += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        sandbox = NamespaceSandbox(ours, self._number_killer(self._numbers), counter)
        order = {"do": "new", "number": self._numbers, "limits": self._lower_limits(limits)}
        try:
            with theirs:  # this end is closed, because a wait for the sandbox would otherwise not end if the box dies
                await send_with(self._box, json.dumps(order).encode(), theirs.fileno())
            await sandbox.wait_ready(CREATE_SECONDS)
        except BaseException:
            await sandbox.close()
            raise
        self._counter.count_start()
        return sandbox

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Run a program in a new or emptied sandbox; see `Sandboxes.run`."""
        refuse_user(program.user)
        return await self._counter.watch(self._run(program, files or {}))

    async def _run(self, program: Program, files: Mapping[str, bytes]) -> ExecResult:
        """Run a program without adding it to the counters."""
        sandbox = await self._take_spare()
        self._running += 1
        self._counter.note_use(1)
        try:
            self._fill()
            for path, data in files.items():
                await sandbox.upload(path, data)
            result = await sandbox.exec(program, renew=self._can_renew)
        except BaseException as error:
            self._count_loss(error)
            await sandbox.close()
            raise
        finally:
            self._running -= 1
            self._counter.note_use(-1)
        dirt = find_dirt(program, result)
        if self._can_renew and dirt is not None:
            self._counter.count_replacement(dirt)
        if self._can_renew and len(self._spares) < self._config.spares and dirt is None:
            self._spares.append(sandbox)
        else:
            await sandbox.close()
            self._fill()
        return result

    @property
    def _can_renew(self) -> bool:
        """True if a used sandbox may be emptied for the next program."""
        return self.renews and self._config.spares > 0

    def _count_loss(self, error: BaseException) -> None:
        """Count a sandbox that was closed because of an error while it ran a program."""
        if isinstance(error, SandboxFailed):
            self._counter.count_replacement(Replacement.FAILED)
        elif self._can_renew:
            self._counter.count_replacement(Replacement.STOPPED)

    async def open_workspace(self, limits: SandboxLimits = NO_LIMITS) -> Workspace:
        """Create a sandbox with sessions for an agent's tools; see `Sandboxes.open_workspace`."""
        from rollflow.tasks.sandboxes.workspace import BoxWorkspace

        most = min(limits.folder_bytes or self._config.folder_bytes, self._config.folder_bytes)
        is_isolated = Capability.ISOLATION in self.capabilities
        # The counter is None, because the process that runs the sandbox's commands does not count as a program.
        sandbox = await self._create_in_box(limits, None)
        return BoxWorkspace(sandbox, self._config.output_bytes, most, self._counter, is_isolated=is_isolated)

    async def close(self) -> None:
        """End all processes of the container (box), and thus all its sandboxes."""
        await self._end_box()

    def _build_command(self, descriptor: int) -> list[str]:
        """Return the command that starts the box. The box's first process gets the caller's socket as file descriptor
        `descriptor`.
        """
        raise NotImplementedError

    def _lower_limits(self, limits: SandboxLimits) -> dict[str, Any]:
        """Return the requested limits of a sandbox that are stricter than the config."""
        lower: dict[str, Any] = {}
        for name in ("memory_bytes", "folder_bytes"):
            given, most = getattr(limits, name), getattr(self._config, name)
            if given is not None and given < most:
                lower[name] = given
        cores = sorted(os.sched_getaffinity(0))
        if limits.cores is not None and limits.cores < len(cores):
            lower["cores"] = [cores[(self._numbers + place) % len(cores)] for place in range(limits.cores)]
        return lower

    def _refusal(self, reason: str) -> str:
        return f'sandbox.kind = "{self._config.kind}" cannot run on this machine: {reason}'

    async def _start_box(self) -> None:
        await self._end_box()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            command, fds = self._build_command(theirs.fileno()), (theirs.fileno(),)
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=fds, stdin=none, stdout=none, stderr=pipe, env={}
            )
        finally:
            theirs.close()
        self._box = ours
        if not await asyncio.get_running_loop().sock_recv(ours, CHUNK):
            raise SandboxFailed(await self._read_error())

    def _has_died(self) -> bool:
        """Return whether the box has ended, and all its sandboxes with it, or was never started."""
        return self._process is None or self._process.returncode is not None

    async def _end_box(self) -> None:
        spares = list(self._spares)
        self._spares.clear()
        tasks = [spare for spare in spares if isinstance(spare, asyncio.Task)]
        for task in tasks:
            task.cancel()
        for found in (*spares, *await asyncio.gather(*tasks, return_exceptions=True)):
            if isinstance(found, NamespaceSandbox):
                await found.close()
        if self._box:
            self._box.close()
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._box = self._process = None

    async def _read_error(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        text = " ".join((await self._process.stderr.read()).decode(errors="replace").split())
        return text[-LONGEST_ERROR:] or "its first process ended without a message"

    def _number_killer(self, number: int) -> Callable[[], None]:
        """Return a function that kills the supervising process of sandbox `number`, even if the process does not
        answer."""

        def kill() -> None:
            if self._box:
                with contextlib.suppress(OSError):
                    self._box.send(json.dumps({"do": "kill", "number": number}).encode())

        return kill

    async def _take_spare(self) -> NamespaceSandbox:
        """Return a sandbox that is ready, or create one."""
        while self._spares and not self._has_died():
            spare = self._spares.popleft()
            try:
                if isinstance(spare, asyncio.Task):
                    return await spare
                await spare.wait_renewed()
                self._counter.count_renewal()
                return spare
            except SandboxFailed:
                if isinstance(spare, NamespaceSandbox):
                    self._counter.count_replacement(Replacement.NOT_EMPTIED)
                if self._process is None:  # `close` was called meanwhile
                    raise
        return await self._create_in_box(NO_LIMITS, None)

    def _fill(self) -> None:
        """Create sandboxes in the background, so that later programs start sooner. A sandbox in use counts as a ready
        sandbox if it can be emptied for the next program.
        """
        coming = self._running if self.renews else 0
        while not self._has_died() and len(self._spares) + coming < self._config.spares:
            self._spares.append(asyncio.create_task(self._create(NO_LIMITS, None)))


def find_dirt(program: Program, result: ExecResult) -> Replacement | None:
    """Return why a sandbox should not be used again after a program with this result, or None if it can be."""
    if result.end is not ProgramEnd.EXITED:
        return Replacement(result.end)
    if result.return_code < 0:
        return Replacement.SIGNAL
    return Replacement.CHILDREN if program.keep_children else None


class BubblewrapSandboxes(BoxSandboxes):
    """Creates sandboxes in a box of Linux namespaces."""

    capabilities = frozenset(Capability) - {Capability.USERS}
    renews = True

    def __init__(self, config: BubblewrapSandbox, packages: Mapping[str, str] = NO_PACKAGES) -> None:
        super().__init__(config)
        self._bubblewrap, self._packages = config, packages

    def _build_command(self, descriptor: int) -> list[str]:
        return build_command(self._bubblewrap, descriptor, self._packages)


def _link_library(base: Path, inside: Path) -> list[str]:
    """Return the options of `bwrap` by which a Python with a shared library finds it at its original path. `base` is
    Python's folder on this machine, and `inside` the same folder in the sandbox. Programs can pass through the folders
    above the library, but cannot list them.
    """
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return []
    above = [
        one for folder in [*reversed(base.parents[:-1]), base] for one in ("--perms", "0711", "--dir", str(folder))
    ]
    return [*above, "--symlink", f"{inside}/lib", f"{base}/lib"]


def build_command(config: BubblewrapSandbox, descriptor: int, packages: Mapping[str, str] = NO_PACKAGES) -> list[str]:
    """Return the `bwrap` command that starts a box. The box's first process gets the caller's socket as file descriptor
    `descriptor`. `packages` are the paths of Python packages that programs may read, by name.

    Raises:
        SandboxFailed: the program bwrap is not installed on this machine.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise SandboxFailed("the program bwrap is not installed; install the package bubblewrap")
    root = os.geteuid() == 0
    limits = {name: getattr(config, name) for name in LIMITS}
    limits |= {"imports": config.imports, "packages": [PACKAGES] if packages else []}
    limits |= {"user": NOBODY if root else None, "descriptor": descriptor}
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--cap-add", "ALL"] if root else ["--unshare-user"]
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    for path in (*LIBRARIES, *FILES):
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    base = Path(sys.base_prefix).resolve()
    inside = base if base.is_relative_to("/usr") else Path("/python")
    if inside != base:
        options += ["--ro-bind", str(base), str(inside)]
        options += _link_library(base, inside)
    options += ["--perms", "0755", "--dir", PACKAGES] if packages else []
    for path in packages.values():
        options += ["--ro-bind", path, f"{PACKAGES}/{Path(path).name}"]
    options += ["--perms", "0755", "--dir", "/dev"]
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for target, link in LINKS:
        options += ["--symlink", target, link]
    options += ["--proc", "/proc", "--dir", "/work", "--ro-bind", str(BOX), IN_BOX, "--remount-ro", "/"]
    options += ["--setenv", "PATH", f"{inside}/bin:/usr/local/bin:/usr/bin:/bin", "--setenv", "PYTHONHASHSEED", "0"]
    python = inside / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    start = [str(python), "-S", "-X", "utf8", "-P", f"{IN_BOX}/start.py", json.dumps(limits)]
    return [bwrap, *options, *start]
