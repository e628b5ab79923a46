"""Starts a program on the host, either as a plain process or as a process confined by the package sandlock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollflow.tasks.sandboxes.box.rights import EQUAL, Rule

READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
READABLE_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/openssl.cnf", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FINISH_SECONDS = 5.0
# system calls that change permissions, owners, times or attributes of files, which Landlock does not control
METADATA: tuple[Rule, ...] = (
    *(((90, None), ()), ((91, 52), ()), ((268, 53), ())),  # chmod, fchmod, fchmodat
    *(((92, None), ()), ((93, 55), ()), ((94, None), ()), ((260, 54), ())),  # chown, fchown, lchown, fchownat
    *(((132, None), ()), ((235, None), ()), ((261, None), ())),  # utime, utimes, futimesat
    *(((280, 88), ((1, EQUAL, 0, False),)), ((280, 88), ((1.5, EQUAL, 0, False),))),  # utimensat with a path
    *(((188, 5), ()), ((189, 6), ()), ((190, 7), ())),  # setxattr, lsetxattr, fsetxattr
    *(((197, 14), ()), ((198, 15), ()), ((199, 16), ())),  # removexattr, lremovexattr, fremovexattr
)


class Launched(Protocol):
    """A program that was started."""

    @property
    def pid(self) -> int:
        """The process id of the program."""

    def finish(self) -> int:
        """Reap the process, which has ended or was killed, and return its exit code."""


class Places(Protocol):
    """The folders and the settings of a sandbox in which a program is started."""

    work: str
    program: str
    settings: dict[str, Any]


# starts a command in a sandbox, with environment variables and with file descriptors for stdin, stdout and stderr
Launch = Callable[[Places, Sequence[str], Mapping[str, str], tuple[int, int, int]], Launched]


class PlainProcess:
    """A process without confinement, in a Unix session of its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str, fds: tuple[int, int, int]) -> None:
        self._process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=fds[0], stdout=fds[1], stderr=fds[2], start_new_session=True
        )
        self.pid = self._process.pid

    def finish(self) -> int:
        """Reap the process and return its exit code; see `Launched`."""
        return self._process.wait()


def launch_plain(
    places: Places, command: Sequence[str], env: Mapping[str, str], fds: tuple[int, int, int]
) -> PlainProcess:
    """Start a program as a process without confinement; see `Launch`."""
    return PlainProcess(command, env, places.work, fds)


class SandlockProcess:
    """A process that the package sandlock confines."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def finish(self) -> int:
        """Reap the process and return its exit code; see `Launched`."""
        result = self._process.wait(FINISH_SECONDS)
        if result.reason is None or result.reason.name in ("KILLED", "TIMEOUT"):
            return -9
        return -result.signal if result.reason.name == "SIGNALED" else int(result.exit_code)


def find_sandlock(settings: dict[str, Any]) -> Launch:
    """Import the package sandlock, and return a function that starts a confined program.

    Raises:
        SystemExit: the kernel's version of Landlock is too old for sandlock.
    """
    sys.path.append(settings["packages"])
    import sandlock

    found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if found < needed:
        raise SystemExit(
            f"sandlock needs version {needed} of the kernel's Landlock (Linux 6.12), but this kernel has version "
            f"{max(found, 0)}"
        )
    existing = [path for path in (*READABLE, *READABLE_FILES) if os.path.exists(path)]
    shared = [*existing, settings["python_folder"], settings["program"], *settings["readable"]]

    def launch(
        places: Places, command: Sequence[str], env: Mapping[str, str], fds: tuple[int, int, int]
    ) -> SandlockProcess:
        sandbox = sandlock.Sandbox(
            fs_readable=[*shared, places.program],
            fs_writable=[places.work, *DEVICES],
            cwd=places.work,
            max_processes=settings["processes"],
            max_open_files=settings["open_files"],
            clean_env=True,
            env=dict(env),
        )
        own = [os.dup(fd) for fd in range(3)]
        try:  # sandlock passes only the file descriptors 0, 1 and 2 to the program
            for place, fd in enumerate(fds):
                os.dup2(fd, place)
            return SandlockProcess(sandbox.popen(list(command)))
        except RuntimeError as error:
            raise OSError(f"sandlock did not start the program: {error}") from None
        finally:
            for place, fd in enumerate(own):
                os.dup2(fd, place)
                os.close(fd)

    return launch
