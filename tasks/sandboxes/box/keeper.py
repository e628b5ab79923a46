"""The keeper of one sandbox: process 1 of the sandbox's namespaces, which runs the owner's programs in turn."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import stat
import struct
import time
from collections.abc import Mapping
from typing import Any

from rollflow.tasks.sandboxes.box.rights import PR_SET_DUMPABLE, build_filter, check, give_up_rights, libc
from rollflow.tasks.sandboxes.box.watch import (
    CHUNK,
    NO_CORE,
    Watch,
    collect_ended,
    find_excess,
    kill_all,
    list_processes,
    set_limits,
)
from rollflow.tasks.sandboxes.box.wire import pack, receive

NOSUID, NODEV, NOEXEC = 2, 4, 8  # flags of mount
FOLDER = "/work"
OPENAT2 = 437
BENEATH = 0x01 | 0x02 | 0x08  # no other file system, no link of /proc, nothing above the folder
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
IDLE_SECONDS = 0.1  # time between two measurements of children that outlive their program
NOT_STARTED = 127  # return code of a command that does not exist, as in a shell
Request = dict[str, Any]


class Keeper:
    """Serves the owner of one sandbox. See the module's docstring."""

    def __init__(self, owner: socket.socket, limits: dict[str, Any]) -> None:
        """Mount the sandbox's own folder and its view of its processes."""
        self._owner, self._limits = owner, limits
        self._filter = build_filter(os.uname().machine)
        size = f"size={limits['folder_bytes']},nr_inodes={limits['folder_files']},mode=0755"
        mount("tmpfs", FOLDER, "tmpfs", NOSUID | NODEV, size)
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "")
        os.chdir(FOLDER)
        check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # so that no program can open this process's memory
        resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
        self._answer({"ready": True})

    def serve(self) -> Request:
        """Answer the owner's requests; return only in the process of a warm program, with the program's request."""
        while True:
            self._watch_children()
            request, body, fds = receive(self._owner)
            if request["do"] == "exec":
                if self._run(request, body, fds):
                    return request
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

    def _answer(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._owner.sendall(pack(dict(header), body))

    def _watch_children(self) -> None:
        """Hold the limits of children that outlived their program until the owner's next request."""
        while list_processes() and not select.select([self._owner], [], [], IDLE_SECONDS)[0]:
            collect_ended()
            if find_excess(self._limits):
                kill_all()

    def _run(self, request: Request, body: bytes, fds: list[int]) -> bool:
        """Run a program and answer with its result; return True only in the process of a warm program."""
        began = time.monotonic()
        stdin = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
        with os.fdopen(stdin, "wb", closefd=False) as file:
            file.write(body)
        os.lseek(stdin, 0, os.SEEK_SET)
        fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, SEALS)  # a program could store bytes in there that nobody counts
        out, err = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_program(request, (stdin, out[1], err[1]), fds)
            return True
        for fd in (stdin, out[1], err[1], *fds):
            os.close(fd)
        watch = Watch(self._owner, pid, [out[0], err[0]], self._limits)
        watch.wait(began + request["timeout"], keep_children=request["keep_children"])
        result = {"end": watch.end, "code": watch.code, "seconds": time.monotonic() - began}
        self._answer(result | {"stdout": len(watch.output[0])}, bytes(watch.output[0] + watch.output[1]))
        return False

    def _become_program(self, request: Request, standard: tuple[int, int, int], fds: list[int]) -> None:
        """Turn this child into the program; return if the program is warm.

        The child gets its descriptors and its limits, and gives up its rights.
        """
        try:
            os.setsid()
            for place, fd in enumerate((*standard, *fds)):
                os.dup2(fd, place)
                os.set_inheritable(place, True)
            os.closerange(len(standard) + len(fds), os.sysconf("SC_OPEN_MAX"))
            check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # so that the keeper can measure its memory
            set_limits(self._limits, request["timeout"])
            give_up_rights(self._filter)
            os.chdir(os.path.join(FOLDER, request["cwd"]))
            if request["command"]:
                os.execvpe(request["command"][0], request["command"], variables_of(request))
        except (OSError, ValueError) as error:
            named = " ".join(request["command"][:1]) or request["name"]
            os.write(2, f"{named}: {error}\n".encode())
            os._exit(NOT_STARTED)


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Mount a file system; raise `OSError` if the kernel refuses."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def variables_of(request: Request) -> dict[str, str]:
    """Return the environment variables of a program."""
    own = {"PATH": os.environ["PATH"], "HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return {**own, **request["env"]}


def open_beneath(path: str, flags: int, mode: int = 0) -> int:
    """Open a path below the sandbox's folder; links that lead out of the folder are refused."""
    folder = os.open(FOLDER, os.O_PATH)
    try:
        how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, BENEATH)
        fd = libc.syscall(OPENAT2, folder, os.fsencode(path or "."), how, len(how))
        check(fd, "open")
        return int(fd)
    finally:
        os.close(folder)


def make_folders(path: str) -> None:
    """Create the missing folders above a path below the sandbox's folder."""
    parts = path.split("/")[:-1]
    for count, name in enumerate(parts):
        above = open_beneath("/".join(parts[:count]), os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(name or ".", dir_fd=above)
        except FileExistsError:
            pass  # whatever it is: the next step opens it as a folder
        finally:
            os.close(above)


def write_file(path: str, data: bytes) -> None:
    """Write a file below the sandbox's folder, and create missing folders."""
    make_folders(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = open_beneath(path, flags, 0o755)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)


def read_file(path: str, most: int) -> bytes:
    """Read a regular file of at most `most` bytes; a pipe or a device of that name must not block the keeper."""
    fd = open_beneath(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = bytearray()
        while part := os.read(fd, 16 * CHUNK):
            data += part
            if len(data) > most:
                raise OSError(errno.EFBIG, "too large")
        return bytes(data)
    finally:
        os.close(fd)
