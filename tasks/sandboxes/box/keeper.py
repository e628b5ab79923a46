"""Runs the keeper of one sandbox: process 1 of the programs' process namespace, which starts programs and enforces
limits. The keeper runs one program at a time, as requested by the process that created the sandbox. The keeper's parent
process is the sandbox's holder (see `holder`).

The kernel copies each memory page that a forked process writes to, and Python writes to every object that it uses.
These copies take most of the time of a short program, so a keeper uses little of Python, and forks first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollflow.tasks.sandboxes.box.interpreter import touch_memory
from rollflow.tasks.sandboxes.box.rights import (
    PR_SET_DUMPABLE,
    SAME_CORES,
    build_filter,
    check,
    install_filter,
    libc,
    set_capabilities,
)
from rollflow.tasks.sandboxes.box.watch import (
    Watch,
    find_excess,
    kill_all,
    limit_program,
    list_processes,
    reap_ended,
)
from rollflow.tasks.sandboxes.box.wire import pack, pack_text, read_regular_file, receive, receive_text

NOSUID, NODEV, NOEXEC = 2, 4, 8  # flags of mount
FOLDER = "/work"
# environment variables of a program, in addition to PATH
VARIABLES = {"HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
OPENAT2 = 437
# flags of openat2: stay in this file system, follow no links of /proc, never leave the folder
BENEATH = 0x01 | 0x02 | 0x08
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# descriptor of a program's channel, largest descriptor, and number of the system call close_range
CHANNEL, LAST_DESCRIPTOR, CLOSE_RANGE = 3, 0xFFFFFFFF, 436
IDLE_SECONDS = 0.1  # seconds between two measurements of processes that outlived their program
NOT_STARTED = 127  # return code of a command that does not exist, as in a shell
READY = pack({"ready": True})
RENEW = 75  # exit code of a keeper whose sandbox may be renewed
Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """A forked process that waits for a request on the socket `gate` and then becomes the requested program."""

    pid: int
    gate: socket.socket
    stdin: int
    pipes: tuple[int, int]  # the read ends of the pipes for stdout and stderr

    def begin(self, text: bytes, body: bytes, fds: list[int]) -> None:
        """Send the forked process its request, which is JSON text, and the data for its stdin."""
        if body:
            write_all(self.stdin, body)
            os.lseek(self.stdin, 0, os.SEEK_SET)
        # seal stdin, because a program could store data in it beyond the memory limit
        fcntl.fcntl(self.stdin, fcntl.F_ADD_SEALS, SEALS)
        message = pack_text(text)
        # A child of an earlier program may have killed the forked process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                socket.send_fds(self.gate, [message[:1]], fds)
                message = message[1:]
            self.gate.sendall(message)
        self.forget()

    def forget(self) -> None:
        """Close the file descriptors that the keeper needs only to start the program."""
        self.gate.close()
        os.close(self.stdin)


class Keeper:
    """Answers the requests of the process that created the sandbox. See the module's docstring.

    The keeper forks the first program's process before the first request arrives, because the fork takes most of the
    time of a short program.
    """

    def __init__(self, owner: socket.socket, limits: dict[str, Any]) -> None:
        """Prepare the keeper in the holder's process, so that no keeper has to."""
        self._owner, self._limits = owner, limits
        self._filter = build_filter(os.uname().machine, SAME_CORES if "cores" in limits else ())
        self._program: ForkedProgram | None = None
        self._is_clean = True  # False as soon as a program did not end by itself, or may have left processes

    def serve(self) -> Request:
        """Answer requests in an endless loop; only in a process forked to run Python source, return the request of that
        program.
        """
        if own := self._fork_program():
            return own
        self._mount()
        self._owner.sendall(READY)
        while True:
            self._watch_children()
            text, body, fds = receive_text(self._owner)
            request = json.loads(text)
            if request["do"] == "exec":
                if self._program is None and (own := self._fork_program()):
                    return own
                self._run(request, text, body, fds)
                continue
            try:
                data = b""
                if request["do"] == "upload":
                    write_file(request["path"], body)
                else:
                    data = read_file(request["path"], self._limits["folder_bytes"])
                self._answer({}, data)
            except (OSError, ValueError) as error:
                number = getattr(error, "errno", None) or errno.EINVAL
                self._answer({"errno": number, "error": os.strerror(number)})

    def _mount(self) -> None:
        """Mount the sandbox's folder and /proc, and drop all capabilities."""
        size = f"size={self._limits['folder_bytes']},nr_inodes={self._limits['folder_files']},mode=0755"
        mount("tmpfs", FOLDER, "tmpfs", NOSUID | NODEV, size)
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "")
        set_capabilities(0)

    def _answer(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._owner.sendall(pack(dict(header), body))

    def _watch_children(self) -> None:
        """Enforce the limits on processes that outlived their program, until the next request arrives."""
        while self._has_children() and not select.select([self._owner], [], [], IDLE_SECONDS)[0]:
            reap_ended()
            if find_excess(self._limits):
                kill_all()

    def _has_children(self) -> bool:
        """Return whether processes of an earlier program are still running."""
        return self._program is None and bool(list_processes())

    def _fork_program(self) -> Request | None:
        """Fork a process for the next program; only in a child process that is to run Python source, return the
        program's request.
        """
        gate, other = socket.socketpair()
        stdin, out, err = os.memfd_create("stdin", os.MFD_ALLOW_SEALING), os.pipe(), os.pipe()
        # `os.fork` would run functions that Python modules registered, which only reset locks that are free here
        if (pid := libc.fork()) < 0:  # processes of earlier programs have exhausted the limit of processes
            kill_all()
            check(pid := libc.fork(), "fork")
        if pid == 0:
            for one in (gate, self._owner):
                # otherwise garbage collection of the socket would close a descriptor that the program uses
                one.detach()
            return self._become_program(other, (stdin, out[1], err[1]))
        other.close()
        for fd in (out[1], err[1]):
            os.close(fd)
        self._program = ForkedProgram(pid, gate, stdin, (out[0], err[0]))
        return None

    def _run(self, request: Request, text: bytes, body: bytes, fds: list[int]) -> None:
        """Run the request in the forked process, and send its result; then end, if the sandbox is to be renewed."""
        began, program = time.monotonic(), self._program
        assert program is not None
        self._program = None
        program.begin(text, body, fds)
        for fd in fds:
            os.close(fd)
        watch = Watch(self._owner, program.pid, list(program.pipes), self._limits)
        watch.wait(began + request["timeout"], keep_children=request["keep_children"])
        assert watch.code is not None
        self._is_clean &= watch.end == "exited" and watch.code >= 0 and not request["keep_children"]
        result = {"end": watch.end, "code": watch.code, "seconds": time.monotonic() - began}
        self._answer(result | {"stdout": len(watch.output[0])}, bytes(watch.output[0] + watch.output[1]))
        if request["renew"]:
            os._exit(RENEW if self._is_clean else 1)
        watch.close()

    def _become_program(self, gate: socket.socket, standard: tuple[int, int, int]) -> Request:
        """Wait for a request and execute its command; if the request has Python source, return the request.

        Before it reads the request, the forked process drops all capabilities, closes all file descriptors but stdin,
        stdout, stderr and the channel, and installs the filter of system calls.
        """
        set_capabilities(0)
        os.setsid()
        for place, fd in enumerate((*standard, gate.detach())):
            os.dup2(fd, place)
            os.set_inheritable(place, True)
        check(libc.syscall(CLOSE_RANGE, CHANNEL + 1, LAST_DESCRIPTOR, 0), "close_range")
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # let the keeper measure this process's memory
        install_filter(self._filter)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, CHANNEL)
        touch_memory()
        request, _, fds = receive(waiting)
        waiting.close()
        for fd in fds:
            os.dup2(fd, CHANNEL)
            os.close(fd)
        try:
            limit_program(self._limits, request["timeout"])
            os.chdir(os.path.join(FOLDER, request["cwd"]))
            if request["command"]:
                os.execvpe(request["command"][0], request["command"], {**os.environ, **request["env"]})
        except (OSError, ValueError) as error:
            named = " ".join(request["command"][:1]) or request["name"]
            os.write(2, f"{named}: {error}\n".encode())
            os._exit(NOT_STARTED)
        return request


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Mount a file system; raise `OSError` if the kernel refuses the mount."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def unmount(target: str) -> None:
    """Unmount a file system; raise `OSError` if the file system is still in use."""
    check(libc.umount2(target.encode(), 0), f"unmount {target}")


def open_beneath(path: str, flags: int, mode: int = 0) -> int:
    """Open a path below the sandbox's folder; reject links that lead out of the folder."""
    if "\0" in path:
        raise ValueError("the path contains a null byte")
    folder = os.open(FOLDER, os.O_PATH)
    try:
        how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, BENEATH)
        fd = libc.syscall(OPENAT2, folder, os.fsencode(path or "."), how, len(how))
        check(fd, "open")
        return int(fd)
    finally:
        os.close(folder)


def make_folders(path: str) -> None:
    """Create the missing parent folders of a path below the sandbox's folder."""
    parts = path.split("/")[:-1]
    for count, name in enumerate(parts):
        above = open_beneath("/".join(parts[:count]), os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(name or ".", dir_fd=above)
        except FileExistsError:
            pass  # if the path is a file and not a folder, the next `open_beneath` fails
        finally:
            os.close(above)


def write_file(path: str, data: bytes) -> None:
    """Write a file below the sandbox's folder, and create its missing parent folders."""
    make_folders(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = open_beneath(path, flags, 0o755)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all data to an open file."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_file(path: str, most: int) -> bytes:
    """Read a regular file of at most `most` bytes, without blocking on a pipe or a device."""
    return read_regular_file(open_beneath(path, os.O_RDONLY | os.O_NONBLOCK), most)
