"""Forks the programs of one sandbox, and empties the sandbox after each program, in a process called the holder.

    keeper --fork--> holder --clone into a new process namespace--> process 1 of the programs' namespace
      |                |
      |                 --clone into the same namespace--> program, a child of the keeper

The keeper is the process that supervises the sandbox and orders each program. After a program, the keeper kills process
1 of the programs' process namespace, so that the kernel kills all processes of this namespace. The holder then mounts a
new folder and a new `/proc`, and forks the next program in a new process namespace.

* Programs cannot signal, trace or read the holder or the keeper, which are outside their process namespace.
* A program inherits no data of an earlier program, because the holder reads no request, output or exit code.
* The sandbox ends if a program was killed, if a process was killed from outside, or if a file system or an object of
  System V IPC remains.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike `signal`, it looks up no enumerations
import _socket
import ctypes
import gc
import os
import signal
import socket
from typing import Any

from rollflow.tasks.sandboxes.box.files import FOLDER
from rollflow.tasks.sandboxes.box.interpreter import touch_memory
from rollflow.tasks.sandboxes.box.keeper import Control, Keeper, Request
from rollflow.tasks.sandboxes.box.mounts import detach, mount_folder, mount_proc, unmount
from rollflow.tasks.sandboxes.box.rights import (
    CLONE,
    PR_SET_DUMPABLE,
    SAME_CORES,
    LoadedFilter,
    build_filter,
    check,
    drop_capabilities,
    forbid_privileges,
    libc,
)
from rollflow.tasks.sandboxes.box.watch import limit_program, set_limits
from rollflow.tasks.sandboxes.box.wire import LONGEST_TEXT, STARTED, WARM, Order, receive

PROCESSES = 0x20000000  # clone flag of a new process namespace
# clone flags: share memory, share file descriptors, keep the same parent, and store the thread id at an address
SAME_MEMORY, SAME_FILES, SAME_PARENT, STORED_ID = 0x100, 0x400, 0x8000, 0x01000000 | 0x00200000
PR_GET_TID_ADDRESS = 40
STACK = 16384  # size in bytes of the stack of a cloned process
# descriptor of a program's channel, largest descriptor, and number of the system call close_range
CHANNEL, LAST_DESCRIPTOR, CLOSE_RANGE = 3, 0xFFFFFFFF, 436
NOT_STARTED = 127  # return code of a command that does not exist, as in a shell
OBJECTS = ("/proc/sysvipc/shm", "/proc/sysvipc/msg", "/proc/sysvipc/sem")  # lists of the System V IPC objects
LONGEST = 4096


def find_thread_id() -> ctypes.c_void_p:
    """Return the address of the main thread's id in the C library; return a null pointer if the kernel does not report
    it.
    """
    address = ctypes.c_void_p()
    libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return address


# address of the main thread's id, found in the first process of the container
THREAD_ID = find_thread_id()


def keep_sandbox(owner: socket.socket, limits: dict[str, Any]) -> Request:
    """Fork the holder process of a sandbox, and answer requests as the sandbox's supervising process. `keep_sandbox`
    returns only in a process that was forked for a program of Python source, and returns the program's request.

    Raises:
        OSError: the sandbox cannot be created or renewed.
    """
    if "cores" in limits:
        os.sched_setaffinity(0, limits["cores"])
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # prevents programs from reading the memory of process 1
    set_limits(limits)
    forbid_privileges()
    gc.disable()  # a collection would write to memory that forked processes share; programs enable it again
    (orders, order), (answers, answer) = os.pipe(), os.pipe()
    mount_proc()
    proc = os.open("/proc", os.O_PATH)
    detach("/proc")  # unmount the /proc of the outer process namespace, because no program may see it
    # The holder opens the pipes of a program for its supervising process, so both share a table of file descriptors.
    pid = libc.syscall(CLONE[os.uname().machine], SAME_FILES | signal.SIGCHLD, 0, 0, 0, 0)
    check(pid, "clone")
    if pid == 0:
        owner.detach()
        return Holder(orders, answer, limits).serve()
    os.fchdir(proc)
    os.close(proc)
    drop_capabilities()
    return Keeper(owner, Control(order, answers, pid), limits).serve()


class Holder:
    """Forks programs on the order of the sandbox's supervising process; `orders` and `answer` are the ends of pipes."""

    def __init__(self, orders: int, answer: int, limits: dict[str, Any]) -> None:
        machine = os.uname().machine
        self._orders, self._keeper, self._limits = orders, answer, limits
        self._filter = LoadedFilter(build_filter(machine, SAME_CORES if "cores" in limits else ()))
        self._clone, self._first = CLONE[machine], 0
        self._own = os.pidfd_open(os.getpid())
        self._stack = ctypes.create_string_buffer(STACK)
        self._top = ctypes.c_void_p((ctypes.addressof(self._stack) + STACK) // 64 * 64)
        self._pause = ctypes.cast(libc.pause, ctypes.c_void_p)
        self._objects, self._has_folder = read_objects(), False
        # the kernel reaps the children of process 1, which inherits this setting
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def serve(self) -> Request:
        """Fork programs until the supervising process is gone. `serve` returns only in a process that was forked for a
        program of Python source, and returns the program's request.
        """
        while order := os.read(self._orders, 1):
            try:
                if request := self._answer(order):
                    return request
            except OSError as error:
                text = str(error).encode()[:LONGEST_TEXT]
                os.write(self._keeper, STARTED.pack(error.errno or -1, self._first, 0, 0, 0, 0, 0) + text)
        os._exit(0)

    def _answer(self, order: bytes) -> Request | None:
        """Fork a program, and send its file descriptors to the supervising process. In a process that was forked for
        Python source, `_answer` returns the program's request; in this process, it returns None.
        """
        if is_new := order != Order.FORK.value:
            self._first = 0
            self._prepare_mounts(has_folder=order == Order.EMPTY.value)
            self._start_namespace()
        gates = _socket.socketpair()
        # Descriptors as plain numbers are not closed by Python, because the supervising process closes them.
        gate, other = gates[0].detach(), gates[1].detach()
        stdin, out, err = os.memfd_create("stdin", os.MFD_ALLOW_SEALING), os.pipe(), os.pipe()
        pid = libc.syscall(self._clone, SAME_PARENT | STORED_ID | signal.SIGCHLD, 0, 0, THREAD_ID, THREAD_ID)
        if pid == 0:
            return self._become_program((stdin, out[1], err[1], other), is_new)
        number = ctypes.get_errno()
        for fd in (other, out[1], err[1]):
            os.close(fd)
        if pid < 0:
            for fd in (gate, stdin, out[0], err[0]):
                os.close(fd)
            raise OSError(number, f"fork: {os.strerror(number)}")
        os.write(self._keeper, STARTED.pack(0, self._first, pid, gate, stdin, out[0], err[0]))
        return None

    def _prepare_mounts(self, *, has_folder: bool) -> None:
        """Unmount `/proc`, and mount a new folder if the order asks for it; exit if an object of System V IPC was
        created.
        """
        if self._has_folder:
            unmount("/proc")
        if has_folder:
            return
        if self._has_folder:
            self._has_folder = False
            unmount(FOLDER)
            if read_objects() != self._objects:
                os._exit(1)
        mount_folder(self._limits)
        self._has_folder = True

    def _start_namespace(self) -> None:
        """Start process 1 of a new process namespace, in which the next children of this process start."""
        check(libc.setns(self._own, PROCESSES), "setns")  # a process can leave its namespace only for an inner one
        check(libc.unshare(PROCESSES), "unshare")
        first = libc.clone(self._pause, self._top, SAME_MEMORY | SAME_PARENT | signal.SIGCHLD, None)
        check(first, "clone")
        self._first = first

    def _become_program(self, fds: tuple[int, int, int, int], is_new: bool) -> Request:
        """Wait for a request and execute its command; if the request has Python source, return the request.

        Before it reads the request, the process mounts `/proc`, drops all capabilities, closes other file descriptors,
        and installs the filter of system calls. `fds` become stdin, stdout, stderr and the channel, which at first is
        the socket to the supervising process.
        """
        for place, fd in enumerate(fds):
            os.dup2(fd, place)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, CHANNEL)
        try:
            self._drop_rights(is_new)
        except OSError as error:
            waiting.send(str(error).encode()[:LONGEST_TEXT])
            os._exit(1)
        touch_memory()
        if is_new:
            waiting.send(WARM)
        request, _, channels = receive(waiting)
        waiting.close()
        for fd in channels:
            os.dup2(fd, CHANNEL)
            os.close(fd)
        try:
            limit_program(self._limits, request["timeout"])
            # All restrictions are active here, because other processes of the sandbox may change this process's memory
            # from now on.
            check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
            os.chdir(os.path.join(FOLDER, request["cwd"]))
            if request["command"]:
                os.execvpe(request["command"][0], request["command"], {**os.environ, **request["env"]})
        except (OSError, ValueError) as error:
            named = " ".join(request["command"][:1]) or request["name"]
            os.write(2, f"{named}: {error}\n".encode())
            os._exit(NOT_STARTED)
        return request

    def _drop_rights(self, is_new: bool) -> None:
        check(libc.syscall(CLOSE_RANGE, CHANNEL + 1, LAST_DESCRIPTOR, 0), "close_range")
        if is_new:
            mount_proc()
        drop_capabilities()
        os.setsid()
        _signal.signal(signal.SIGCHLD, _signal.SIG_DFL)
        os.set_inheritable(CHANNEL, True)
        self._filter.install()


def read_objects() -> list[bytes]:
    """Return the System V IPC objects of the container, as lists."""
    return [read_start(path) for path in OBJECTS]


def read_start(path: str) -> bytes:
    """Return the first bytes of a file, or no bytes if the file does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # the kernel has no System V IPC
        return b""
    try:
        return os.read(fd, LONGEST)
    finally:
        os.close(fd)
