"""Supervises one sandbox, in a process called the keeper: enforces its limits and orders its programs. Programs run one
at a time, as requested by the process that created the sandbox.

No program inherits memory of the keeper, so one keeper serves all programs of its sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rollflow.tasks.sandboxes.box.files import read_file, write_all, write_file
from rollflow.tasks.sandboxes.box.programs import Programs
from rollflow.tasks.sandboxes.box.watch import Watch, find_excess
from rollflow.tasks.sandboxes.box.wire import LONGEST_TEXT, STARTED, WARM, Order, pack, pack_text, receive_text

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
IDLE_SECONDS = 0.1  # seconds between two measurements of processes that outlived their program
READY = pack({"ready": True})
Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """A forked process that waits for a request on the socket `gate`, and then becomes the requested program."""

    pid: int
    gate: socket.socket
    stdin: int
    pipes: tuple[int, int]  # the read ends of the pipes for stdout and stderr

    def begin(self, text: bytes, body: bytes, fds: list[int]) -> None:
        """Send the request (as JSON text) and the data for stdin to the forked process."""
        if body:
            write_all(self.stdin, body)
            os.lseek(self.stdin, 0, os.SEEK_SET)
        # A program could store data in stdin beyond the memory limit, so the file for stdin is sealed against changes.
        fcntl.fcntl(self.stdin, fcntl.F_ADD_SEALS, SEALS)
        message = pack_text(text)
        # A child process of an earlier program may have killed the forked process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                socket.send_fds(self.gate, [message[:1]], fds)
                message = message[1:]
            self.gate.sendall(message)
        self.forget()

    def forget(self) -> None:
        """Close the file descriptors that are needed only to start the program."""
        self.gate.close()
        os.close(self.stdin)


@dataclass(frozen=True, slots=True)
class Control:
    """The holder process, which forks programs, and the ends of the pipes to it."""

    order: int
    answers: int
    holder: int  # process id


class Keeper:
    """Answers the requests of the process that created the sandbox.

    The process of the next program is forked before its request arrives, because the fork takes most of the time of a
    short program.
    """

    def __init__(self, owner: socket.socket, control: Control, limits: dict[str, Any]) -> None:
        self._owner, self._control, self._limits = owner, control, limits
        self._holder = os.pidfd_open(control.holder)
        self._programs = Programs(control.holder)
        self._program: ForkedProgram | None = None
        self._is_clean = True  # False once a program was killed, or may have left processes behind

    def serve(self) -> NoReturn:
        """Answer requests until the process that created the sandbox is gone."""
        self._start_program(Order.RENEW)
        self._owner.sendall(READY)
        while True:
            self._watch_children()
            text, body, fds = receive_text(self._owner)
            request = json.loads(text)
            if request["do"] == "exec":
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

    def _answer(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._owner.sendall(pack(dict(header), body))

    def _watch_children(self) -> None:
        """Enforce the limits on processes that outlived their program, until the next request."""
        while self._has_children() and not select.select([self._owner], [], [], IDLE_SECONDS)[0]:
            self._programs.reap()
            if find_excess(self._limits, self._programs.list_processes, "."):
                self._programs.kill()

    def _has_children(self) -> bool:
        """Return whether processes of an earlier program are still running."""
        return self._program is None and bool(self._programs.first and self._programs.list_processes())

    def _start_program(self, order: Order) -> None:
        """Let the holder process fork a process for the next program.

        Raises:
            OSError: the holder process cannot fork the process, or cannot prepare its namespace.
        """
        os.write(self._control.order, order.value)
        if self._control.answers not in select.select([self._control.answers, self._holder], [], [])[0]:
            os._exit(1)  # the holder was killed
        data = os.read(self._control.answers, LONGEST_TEXT + STARTED.size)
        number, self._programs.first, pid, gate, stdin, out, err = STARTED.unpack_from(data)
        if number:
            raise OSError(number, data[STARTED.size :].decode())
        self._program = ForkedProgram(pid, socket.socket(fileno=gate), stdin, (out, err))
        # Other processes in the same namespace could stop the forked process.
        if order is not Order.FORK and (found := self._program.gate.recv(LONGEST_TEXT)) != WARM:
            raise OSError(errno.ECHILD, found.decode() or "the process that was forked for the program has ended")

    def _find_program(self) -> ForkedProgram:
        """Return the process that was forked for the next program."""
        if self._program is None and self._programs.first:
            try:
                self._start_program(Order.FORK)
            except OSError:  # processes of earlier programs have reached the limit of processes
                self._programs.kill()
        if self._program is None:
            self._start_program(Order.EMPTY)
        program, self._program = self._program, None
        assert program is not None
        return program

    def _run(self, request: Request, text: bytes, body: bytes, fds: list[int]) -> None:
        """Run the request in the forked process and send its result; then empty the sandbox if the request asks
        for it.
        """
        program, began = self._find_program(), time.monotonic()
        program.begin(text, body, fds)
        for fd in fds:
            os.close(fd)
        watch = Watch(self._owner, self._programs, program.pid, program.pipes, self._limits)
        watch.wait(began + request["timeout"], keep_children=request["keep_children"])
        assert watch.code is not None
        if watch.end == "exited" and watch.code < 0 and self._programs.first and self._programs.is_ending():
            os._exit(1)  # the program was killed from outside of the sandbox
        self._is_clean &= watch.end == "exited" and watch.code >= 0 and not request["keep_children"]
        result = {"end": watch.end, "code": watch.code, "seconds": time.monotonic() - began}
        self._answer(result | {"stdout": len(watch.output[0])}, bytes(watch.output[0] + watch.output[1]))
        watch.close()
        if request["renew"]:
            if not self._is_clean:
                os._exit(1)
            self._programs.kill()
            self._start_program(Order.RENEW)
            self._owner.sendall(READY)
