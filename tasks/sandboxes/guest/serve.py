"""Runs an agent's commands and sessions in parallel, as a program inside one sandbox.

The process that created the sandbox (see `workspace`) sends requests through the socket at file descriptor 3. A single
thread serves all requests: each request is a generator that yields the file descriptors and the deadline that it waits
for.

Commands in the sandbox cannot read the memory or the file descriptors of this process. A command in the sandbox can
kill this process, but cannot forge an answer of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import stat
import time
from typing import NoReturn

from rollflow.tasks.sandboxes.box.tree import list_children
from rollflow.tasks.sandboxes.box.wire import CHUNK, pack, read_regular_file, receive
from rollflow.tasks.sandboxes.guest.process import GuestProcess, kill_descendants
from rollflow.tasks.sandboxes.guest.session import NOT_STARTED, SOON, GuestSession, Header, Work
from rollflow.tasks.sandboxes.host.files import read_file, write_file

CHANNEL = 3  # file descriptor of the socket to the process that created the sandbox
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
WALL = 0x40000000  # makes waitpid also reap children whose exit signal is not SIGCHLD


class SandboxGuest:
    """Answers the requests of the process that created the sandbox."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._roots: set[int] = set()  # ids of the processes that this process started itself
        self._sessions: dict[str, GuestSession] = {}
        # number of a request -> its generator, and the file descriptors and the time that it waits for
        self._works: dict[int, tuple[Work, set[int], float]] = {}
        self._child, child = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(child)

    def serve(self) -> NoReturn:
        """Answer requests until the process that created the sandbox is gone."""
        while True:
            poll = select.poll()
            for fd in {self._owner.fileno(), self._child}.union(*(fds for _, fds, _ in self._works.values())):
                poll.register(fd, select.POLLIN)
            until = min((until for _, _, until in self._works.values()), default=None)
            seconds = None if until is None else max(0.0, until - time.monotonic())
            ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000 + 1)}
            if self._child in ready:
                os.read(self._child, CHUNK)
                self._collect_orphans()
            for number, (work, fds, until) in list(self._works.items()):
                if fds & ready or time.monotonic() >= until:
                    self._advance(number, work, fds & ready)
            if self._owner.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        """Receive and start the next request; exit if the sandbox's creator is gone."""
        request, body, _ = receive(self._owner)
        self._advance(request["number"], getattr(self, f"do_{request['do']}")(request, body), None)

    def _advance(self, number: int, work: Work, ready: set[int] | None) -> None:
        """Resume the generator of a request; send the answer if the generator has finished."""
        try:
            fds, until = next(work) if ready is None else work.send(ready)
            self._works[number] = (work, set(fds), until)
            return
        except StopIteration as stop:
            header, body = stop.value
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", None) or errno.EINVAL
            header, body = {"errno": code, "error": os.strerror(code)}, b""
        self._works.pop(number, None)
        self._owner.sendall(pack({"number": number, **header}, body))

    def do_exec(self, request: Header, stdin: bytes) -> Work:
        """Run a command, without waiting for its background processes."""
        began, most, end = time.monotonic(), request["most"], "exited"
        reading, writing = os.pipe()
        try:
            process = GuestProcess(self._roots, request["command"], request, 2, stdin=reading)
        except (OSError, ValueError) as error:
            os.close(writing)
            message = f"{request['command'][0]}: {error}\n".encode()
            return {"end": end, "code": NOT_STARTED, "stdout": 0, "seconds": 0.0}, message
        finally:
            os.close(reading)
        os.set_blocking(writing, False)
        data, deadline = memoryview(stdin), began + request["timeout"]
        while not process.has_ended() and end == "exited":
            try:
                data = data[os.write(writing, data) :] if data else data
            except BlockingIOError:
                pass
            except BrokenPipeError:
                data = memoryview(b"")
            if not data and writing >= 0:
                os.close(writing)
                writing = -1
            yield process.fds, min(deadline, time.monotonic() + SOON) if data else deadline
            if not process.read(most):
                end = "output"
            elif time.monotonic() >= deadline:
                end = "timeout"
        if writing >= 0:
            os.close(writing)
        if end != "exited":
            process.kill()
        stdout, stderr = process.take_output(most)
        code = process.collect()
        if not request["keep_children"] or end != "exited":
            self._kill_orphans()
        return {"end": end, "code": code, "stdout": len(stdout), "seconds": time.monotonic() - began}, stdout + stderr

    def do_run(self, request: Header, _: bytes) -> Work:
        """Run code in a session; create the session if it does not exist."""
        session = self._sessions.setdefault(request["session"], GuestSession(self._roots, request))
        if session.is_busy:
            raise OSError(errno.EBUSY, "the session is running other code; wait until it has ended")
        return (yield from session.run(request))

    def do_stop(self, request: Header, _: bytes) -> Work:
        """Interrupt the code that a session runs, as at its deadline."""
        if (session := self._sessions.get(request["session"])) and session.is_busy:
            session.is_stopped = True
            work, fds, _until = self._works[session.request]
            self._works[session.request] = (work, fds, 0.0)
        yield from ()
        return {}, b""

    def do_close(self, request: Header, _: bytes) -> Work:
        """End a session."""
        if session := self._sessions.get(request["session"]):
            if session.is_busy:
                raise OSError(errno.EBUSY, "the session is running other code; wait until it has ended")
            session.close()
            del self._sessions[request["session"]]
        yield from ()
        return {}, b""

    def do_upload(self, request: Header, data: bytes) -> Work:
        """Write a file and its missing parent folders; with `only_below`, reject paths outside the sandbox's folder."""
        path = request["path"]
        if request["only_below"]:
            write_file(*self._split(path), data)
        else:
            if folder := os.path.dirname(path):
                os.makedirs(folder, exist_ok=True)
            with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(data)
        yield from ()
        return {}, b""

    def do_download(self, request: Header, _: bytes) -> Work:
        """Read a file of at most `most` bytes; with `only_below`, reject paths outside the sandbox's folder."""
        path, most = request["path"], request["most"]
        data = (
            read_file(*self._split(path), most)
            if request["only_below"]
            else read_regular_file(open_regular(path, os.O_RDONLY), most)
        )
        yield from ()
        return {}, data

    def _split(self, path: str) -> tuple[str, str]:
        """Return the sandbox's folder and `path` relative to this folder."""
        folder = os.environ["HOME"]
        return folder, path.removeprefix(f"{folder}/")

    def _collect_orphans(self) -> None:
        """Reap ended orphans, which are processes that this process adopted but did not start."""
        for pid in list_children(os.getpid()):
            if pid not in self._roots:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG | WALL)

    def _kill_orphans(self) -> None:
        """Kill the background processes of commands that have ended."""
        while left := [pid for pid in list_children(os.getpid()) if pid not in self._roots]:
            kill_descendants(left)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, WALL)


def open_regular(path: str, flags: int) -> int:
    """Open a regular file without blocking; reject pipes, devices and files of /proc."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o755)
    try:
        with contextlib.suppress(FileNotFoundError):  # some kinds of sandbox have no /proc
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/proc/"):
                raise OSError(errno.EACCES, "the path leads to a file of /proc, which may not be opened")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "the path does not name a regular file")
    except OSError:
        os.close(fd)
        raise
    return fd


def can_open(path: str) -> bool:
    """Return whether this process can open a file for reading and writing."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def main() -> None:
    """Protect this process from other processes, and answer requests until the sandbox's creator is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) and can_open("/proc/self/mem"):
        raise OSError(ctypes.get_errno(), "the system call prctl failed")
    # This process becomes the parent of orphaned processes; if the kernel refuses, the supervising process reaps them.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(CHANNEL, False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # without this, commands would inherit an ignored SIGINT
    SandboxGuest(socket.socket(fileno=CHANNEL)).serve()
