"""Creates sandboxes that are processes of the host, in a process that never runs code of the model.

    owner --"new", a socket--> this process --fork--> keeper <--requests by the socket-- owner
                                                        | sandlock or a plain process
                                                        v
                                                      program

The owner is the process that requests the sandboxes. A keeper is the process that supervises one sandbox. The keeper
adopts orphans of its programs, and this process adopts orphans of keepers. Thus every process of a program is killed
when the program ends, when its sandbox is closed, or when the owner dies.

This file runs as `python -I -S start.py SETTINGS`, where the JSON text `SETTINGS` contains the file descriptor of the
owner's socket.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

SANDBOXES = os.path.dirname(os.path.dirname(__file__))
# The real `__init__` modules import pydantic, which is missing here, so empty packages are registered.
for name, path in (("rollflow", ""), ("rollflow.tasks", ""), ("rollflow.tasks.sandboxes", SANDBOXES)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]

from rollflow.tasks.sandboxes.box.programs import WALL  # noqa: E402
from rollflow.tasks.sandboxes.box.rights import (  # noqa: E402
    CAPABILITIES,
    CAPABILITY_VERSION,
    PR_CAPBSET_DROP,
    build_filter,
    check,
    libc,
)
from rollflow.tasks.sandboxes.box.tree import list_children  # noqa: E402
from rollflow.tasks.sandboxes.box.wire import CHUNK, pack  # noqa: E402
from rollflow.tasks.sandboxes.host.keeper import HostKeeper  # noqa: E402
from rollflow.tasks.sandboxes.host.launch import METADATA, Launch, find_sandlock, launch_plain  # noqa: E402
from rollflow.tasks.sandboxes.host.tree import kill_children  # noqa: E402

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class HostParent:
    """Creates the supervising process of each sandbox, and kills it on request."""

    def __init__(self, owner: socket.socket, settings: dict[str, Any], launch: Launch) -> None:
        self._owner, self._settings, self._launch = owner, settings, launch
        self._keepers: dict[int, int] = {}  # process id of a supervising process -> number of its sandbox
        self._ended, ended = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ended)

    def serve(self) -> NoReturn:
        """Create and kill sandboxes on request; when the requesting process is gone, kill all sandboxes and exit."""
        while True:
            ready, _, _ = select.select([self._owner.fileno(), self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, CHUNK)
                self._collect()
            if self._owner.fileno() not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(self._owner, CHUNK, 1)
            if not data:
                kill_children(lambda: list_children(os.getpid()))
                remove_folder(self._settings["root"])
                os._exit(0)
            request = json.loads(data)
            if request["do"] == "new":
                self._create(request, fds[0])
            else:
                self._kill(request["number"])

    def _create(self, request: dict[str, Any], fd: int) -> None:
        """Fork the keeper of a sandbox."""
        pid = os.fork()
        if pid == 0:
            self._become_keeper(request, fd)
        self._keepers[pid] = request["number"]
        os.close(fd)

    def _become_keeper(self, request: dict[str, Any], fd: int) -> NoReturn:
        owner = socket.socket(fileno=fd)
        settings = self._settings | request["limits"]
        folder = os.path.join(settings["root"], str(request["number"]))
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._ended)
            self._owner.close()
            check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
            signal.signal(signal.SIGTERM, lambda *_: end_keeper())
            check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "prctl")
            HostKeeper(owner, settings, folder, self._launch).serve()
        except OSError as error:
            owner.sendall(pack({"broken": str(error)}))
        finally:
            end_keeper()

    def _kill(self, number: int) -> None:
        for pid, one in self._keepers.items():
            if one == number:
                os.kill(pid, signal.SIGKILL)

    def _collect(self) -> None:
        """Reap ended supervising processes, kill the processes of their sandboxes, and delete their folders."""
        numbers = []
        try:
            while pid := os.waitpid(-1, os.WNOHANG | WALL)[0]:
                if pid in self._keepers:
                    numbers.append(self._keepers.pop(pid))
        except ChildProcessError:
            pass
        kill_children(self._list_orphans)
        for number in numbers:
            remove_folder(os.path.join(self._settings["root"], str(number)))

    def _list_orphans(self) -> list[int]:
        return [pid for pid in list_children(os.getpid()) if pid not in self._keepers]


def end_keeper() -> NoReturn:
    """Kill all processes of the sandbox that this process supervises, and exit."""
    kill_children(lambda: list_children(os.getpid()))
    os._exit(0)


def remove_folder(folder: str) -> None:
    """Delete a folder tree, even if a program removed the permissions of some of its folders."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.run(["rm", "-rf", "--", folder], check=False, **quiet).returncode:
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], check=False, **quiet)
        subprocess.run(["rm", "-rf", "--", folder], check=False, **quiet)


def give_up_capabilities() -> None:
    """Drop all capabilities of this process and its children, so that root has only the rights of a file's owner."""
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # the call fails for numbers above the last capability
    check(libc.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24)), "capset")


def main() -> NoReturn:
    """Prepare this process, and create sandboxes until the process that started it is gone."""
    settings = json.loads(sys.argv[1])
    owner = socket.socket(fileno=settings["descriptor"])
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    # The process that started this one handles Ctrl-C, and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    makers: dict[str, Callable[[dict[str, Any]], Launch]] = {
        "sandlock": find_sandlock,
        "unsafe-process": lambda _: launch_plain,
    }
    launch = makers[settings["kind"]](settings)
    settings["filter"] = ""
    if settings["kind"] == "sandlock":
        give_up_capabilities()
        settings["filter"] = build_filter(os.uname().machine, METADATA).hex()
    owner.send(b"{}")
    HostParent(owner, settings, launch).serve()


if __name__ == "__main__":
    main()
