"""Creates the sandboxes of a container. The process of this module never runs code that the model wrote.

    owner --"new", a socket--> this process --clone into new namespaces--> keeper --fork--> holder
                                                                             ^                | clone into a new
                                                                             |                | process namespace
                                      owner --requests by the socket---------                 v
                                                                                            program

The container has no network, and shows no files of the host except the system's libraries, read-only. Each sandbox has
its own user, process and mount namespaces, and an empty folder `/work` in memory. The keeper enforces the limits of
programs; when the keeper ends, the kernel kills all processes of the sandbox. The holder forks the programs, and
empties the sandbox after each program (see `holder`).

Python source runs in a fork of the holder, so that common modules are already imported. Each program starts with the
same random seed, so that repeated runs have equal results.

This file runs as `python -I -S start.py LIMITS`, where the JSON text `LIMITS` contains the file descriptor of the
owner's socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

ROOT = __file__.rpartition("/rollflow/")[0]
sys.path.insert(0, ROOT)

from rollflow.tasks.sandboxes.box.code_pages import share_code  # noqa: E402
from rollflow.tasks.sandboxes.box.files import FOLDER  # noqa: E402
from rollflow.tasks.sandboxes.box.holder import keep_sandbox  # noqa: E402
from rollflow.tasks.sandboxes.box.interpreter import run_source, touch_memory  # noqa: E402
from rollflow.tasks.sandboxes.box.keeper import Request  # noqa: E402
from rollflow.tasks.sandboxes.box.mounts import mount_proc  # noqa: E402
from rollflow.tasks.sandboxes.box.rights import CLONE, PR_SET_DUMPABLE, build_filter, check, libc  # noqa: E402
from rollflow.tasks.sandboxes.box.wire import CHUNK, pack  # noqa: E402

PR_SET_PDEATHSIG = 1
# new user, mount and process namespaces, but no IPC namespace, because the seccomp filter rejects IPC calls
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000
# environment variables of a program, in addition to PATH
VARIABLES = {"HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
USER = 1000  # user and group id of a program in the sandbox's user namespace


class Parent:
    """Creates the supervising process of each sandbox, and kills it on request."""

    def __init__(self, owner: socket.socket, limits: dict[str, Any]) -> None:
        self._owner, self._limits = owner, limits
        self._keepers: dict[int, int] = {}  # process id of a supervising process -> number of its sandbox
        self._ended, ended = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ended)

    def serve(self) -> Request:
        """Create and kill sandboxes on request. `serve` returns only in a process that was forked for a program of
        Python source, and returns the program's request.
        """
        while True:
            ready, _, _ = select.select([self._owner.fileno(), self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, CHUNK)
                self._collect()
            if self._owner.fileno() not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(self._owner, CHUNK, 1)
            if not data:
                os._exit(0)
            request = json.loads(data)
            if request["do"] == "new":
                program = self._create(request, fds[0])
                if program is not None:
                    return program
            else:
                self._kill(request["number"])

    def _create(self, request: Request, fd: int) -> Request | None:
        """Start the supervising process of a sandbox in new namespaces. In a process that was forked for Python source,
        `_create` returns the program's request; in this process, it returns None.
        """
        wait, go = os.pipe()
        pid = libc.syscall(CLONE[os.uname().machine], NEW_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os.close(go)
            return self._become_keeper(wait, fd, self._limits | request["limits"])
        os.close(wait)
        # If the user id maps cannot be written, the supervising process cannot mount a file system, and reports this.
        with contextlib.suppress(OSError):
            check(pid, "clone")
            self._keepers[pid] = request["number"]
            for name, text in (("setgroups", "deny"), ("uid_map", os.geteuid()), ("gid_map", os.getegid())):
                with open(f"/proc/{pid}/{name}", "w") as file:
                    file.write(text if isinstance(text, str) else f"{USER} {text} 1")
        os.close(go)
        os.close(fd)
        return None

    def _become_keeper(self, wait: int, fd: int, limits: dict[str, Any]) -> Request:
        owner = socket.socket(fileno=fd)
        try:
            os.read(wait, 1)  # the parent process writes the user id maps of this process first
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(wait)
            os.close(self._ended)
            self._owner.close()
            return keep_sandbox(owner, limits)
        except OSError as error:
            with contextlib.suppress(OSError):
                owner.sendall(pack({"broken": str(error)}))
            os._exit(1)

    def _kill(self, number: int) -> None:
        for pid, one in self._keepers.items():
            if one == number:
                os.kill(pid, signal.SIGKILL)

    def _collect(self) -> None:
        """Reap ended supervising processes."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self._keepers.pop(pid, None)


def become_user(user: int) -> None:
    """Change from root to this user permanently."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def main() -> Request:
    """Prepare this process, and create sandboxes. `main` returns only in a process that was forked for a program of
    Python source, and returns the program's request.
    """
    limits = json.loads(sys.argv[1])
    owner = socket.socket(fileno=limits["descriptor"])
    if limits["user"] is not None:
        # bwrap hides parts of its /proc, and the kernel would then not allow mounting another /proc.
        mount_proc()
        become_user(limits["user"])
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    # Setting the user id clears the dumpable flag, without which the user id map of a child process cannot be written.
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    sys.path.extend(limits["packages"])
    for name in limits["imports"]:
        importlib.import_module(name)
    del sys.path[len(sys.path) - len(limits["packages"]) :]
    prepare_forks()
    owner.send(b"{}")
    return Parent(owner, limits).serve()


def prepare_forks() -> None:
    """Do the work that each program would otherwise repeat, before this process forks."""
    variables = {**VARIABLES, "PATH": os.environ["PATH"]}
    os.environ.clear()
    os.environ.update(variables)
    if "random" in sys.modules:
        sys.modules["random"].seed(0)
    touch_memory()  # the first call creates types, which forks share
    build_filter(os.uname().machine)
    share_code()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    run_source(main())
