"""Runs the holder of one sandbox, which starts the sandbox's keeper and renews the sandbox.

    holder --clone into a new process namespace--> keeper --fork--> program

The holder is process 1 of the sandbox's outer process namespace. If the sandbox is to be renewed, its keeper ends, and
the kernel ends all processes of the keeper's namespace with it. The holder then unmounts the sandbox's folder and
`/proc`, and starts the next keeper in a new process namespace with a new folder and a new `/proc`.

* A program cannot name the holder, and so cannot send a signal to the holder, trace it, or open its files in `/proc`,
  because the holder is not in the process namespace of the programs.
* The next program inherits no data of an earlier one. The holder reads no request, output, exit code or process id of a
  program. A keeper reads them, and each keeper is a new fork of the holder.
* The holder and its sandbox end in three cases: the keeper ended in another way, a file system is still in use, or an
  object of System V IPC exists.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from typing import Any

from rollflow.tasks.sandboxes.box.keeper import FOLDER, RENEW, Keeper, Request, unmount
from rollflow.tasks.sandboxes.box.rights import CLONE, PR_SET_DUMPABLE, check, forbid_privileges, libc
from rollflow.tasks.sandboxes.box.watch import set_limits

NEW_PROCESSES = 0x20000000  # clone flag of a new process namespace
OBJECTS = ("/proc/sysvipc/shm", "/proc/sysvipc/msg", "/proc/sysvipc/sem")  # lists of System V IPC
# the file with the newest process id of a namespace; a known value keeps the number of earlier processes secret
NEWEST, OWN = "/proc/sys/kernel/ns_last_pid", b"1"
LONGEST = 4096


def hold_sandbox(owner: socket.socket, limits: dict[str, Any]) -> Request:
    """Start the sandbox's keepers, one after another; only in a process forked to run Python source, return the
    program's request.

    Raises:
        OSError: the sandbox cannot be created or renewed.
    """
    if "cores" in limits:
        os.sched_setaffinity(0, limits["cores"])
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # keep programs from reading a keeper's memory
    set_limits(limits)
    forbid_privileges()
    gc.disable()  # a collection would write to memory that forked processes share; programs enable it again
    machine, objects, keeper = os.uname().machine, read_objects(), Keeper(owner, limits)
    while True:
        pid = libc.syscall(CLONE[machine], NEW_PROCESSES | signal.SIGCHLD, 0, 0, 0, 0)
        check(pid, "clone")
        if pid == 0:
            return keeper.serve()
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != RENEW:
            os._exit(1)
        unmount("/proc")
        unmount(FOLDER)
        if read_objects() != objects:
            os._exit(1)
        write_newest(OWN)


def read_objects() -> list[bytes]:
    """Return the lists of the System V IPC objects of the box."""
    return [read_start(path) for path in OBJECTS]


def read_start(path: str) -> bytes:
    """Return the first bytes of a file; if the file does not exist, return none."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # the kernel has no System V IPC
        return b""
    try:
        return os.read(fd, LONGEST)
    finally:
        os.close(fd)


def write_newest(number: bytes) -> None:
    """Set the process id after which the next process of this namespace is numbered."""
    fd = os.open(NEWEST, os.O_WRONLY)
    try:
        os.write(fd, number)
    finally:
        os.close(fd)
