"""Supervises one sandbox whose programs are processes of the host, in a process called the keeper. Programs run one at
a time, as requested by the process that created the sandbox, within the limits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import time
from typing import Any

from rollflow.tasks.sandboxes.box.tree import list_children, list_descendants
from rollflow.tasks.sandboxes.box.watch import find_excess
from rollflow.tasks.sandboxes.box.wire import CHUNK, pack, receive
from rollflow.tasks.sandboxes.host.files import read_file, write_file
from rollflow.tasks.sandboxes.host.launch import Launch, Launched
from rollflow.tasks.sandboxes.host.tree import (
    collect_orphans,
    kill_children,
    measure_folder,
)

POLL_SECONDS = 0.03  # seconds between two measurements of the sandbox's memory and processes
FOLDER_SECONDS = 0.1  # seconds between two measurements of the sandbox's folder
GIVEN = ("memory_bytes", "open_files", "folder_bytes", "filter")
Request = dict[str, Any]


class HostKeeper:
    """Answers the requests of the process that created the sandbox."""

    def __init__(self, owner: socket.socket, settings: dict[str, Any], folder: str, launch: Launch) -> None:
        """Create the folder `work` for the program's own files, and the folder `program` for its source code and
        stdin.
        """
        self._owner, self._launch, self.settings = owner, launch, settings
        self.work, self.program = os.path.join(folder, "work"), os.path.join(folder, "program")
        for path in (folder, self.work, self.program):
            os.mkdir(path, 0o700)
        if "cores" in settings:
            os.sched_setaffinity(0, settings["cores"])
        self._answer({"ready": True})

    def serve(self) -> None:
        """Answer requests until the process that created the sandbox is gone."""
        while True:
            self._watch_children()
            request, body, fds = receive(self._owner)
            try:
                if request["do"] == "exec":
                    self._run(request, body, fds)
                elif request["do"] == "upload":
                    if measure_folder(self.work)[0] + len(body) > self.settings["folder_bytes"]:
                        raise OSError(errno.ENOSPC, "the folder of the sandbox would be larger than allowed")
                    write_file(self.work, request["path"], body)
                    self._answer({})
                else:
                    self._answer({}, read_file(self.work, request["path"], self.settings["folder_bytes"]))
            except (OSError, ValueError) as error:
                number = getattr(error, "errno", None) or errno.EINVAL
                self._answer({"errno": number, "error": os.strerror(number)})

    def _answer(self, header: dict[str, Any], body: bytes = b"") -> None:
        self._owner.sendall(pack(header, body))

    def _watch_children(self) -> None:
        """Enforce the limits on processes that outlived their program, until the next request."""
        while not select.select([self._owner], [], [], POLL_SECONDS if self._list() else None)[0]:
            if find_excess(self.settings, self._list) or self._find_folder_excess():
                self._kill_all()

    def _run(self, request: Request, body: bytes, fds: list[int]) -> None:
        """Run a program, and send its result to the process that created the sandbox."""
        began = time.monotonic()
        out, err = os.pipe(), os.pipe()
        order = self._write_order(request, body, has_channel=bool(fds))
        empty = os.open(os.devnull, os.O_RDONLY)
        try:
            command = [self.settings["python"], "-S", "-X", "utf8", "-P", self.settings["program"], order]
            standard = (fds[0] if fds else empty, out[1], err[1])
            launched = self._launch(self, command, self._variables(request), standard)
        finally:
            for fd in (out[1], err[1], empty, *fds):
                os.close(fd)
        watch = HostWatch(self._owner, launched, [out[0], err[0]], self)
        watch.wait(began + request["timeout"])
        if watch.end != "exited" or not request["keep_children"]:
            self._kill_all()
        output = watch.drain()
        result = {"end": watch.end, "code": watch.code, "seconds": time.monotonic() - began}
        self._answer(result | {"stdout": len(output[0])}, output[0] + output[1])

    def _write_order(self, request: Request, stdin: bytes, *, has_channel: bool) -> str:
        """Write the program's stdin and the JSON file that describes the program (see `host.program`); return the path
        of the file.
        """
        paths = [os.path.join(self.program, name) for name in ("order.json", "stdin")]
        order = request | {name: self.settings[name] for name in GIVEN}
        order |= {"stdin": paths[1], "channel": has_channel, "cwd": os.path.join(self.work, request["cwd"])}
        for path, data in zip(paths, (json.dumps(order).encode(), stdin), strict=True):
            with open(path, "wb") as file:
                file.write(data)
        return paths[0]

    def _variables(self, request: Request) -> dict[str, str]:
        own = {"PATH": self.settings["path"], "HOME": self.work, "TMPDIR": self.work, "LANG": "C.UTF-8"}
        return {**own, "PYTHONHASHSEED": "0", **request["env"]}

    def _list(self) -> list[int]:
        return list_descendants(list_children(os.getpid()))

    def _kill_all(self) -> None:
        kill_children(lambda: list_children(os.getpid()))

    def _find_folder_excess(self) -> str:
        size, count = measure_folder(self.work)
        return "folder" if size > self.settings["folder_bytes"] or count > self.settings["folder_files"] else ""

    def find_excess(self, *, with_folder: bool) -> str:
        """Return the name of the limit that the sandbox exceeds, or "" if it exceeds none."""
        return find_excess(self.settings, self._list) or (self._find_folder_excess() if with_folder else "")


class HostWatch:
    """A running program, whose output is read and whose limits are enforced.

    `pipes` are the read ends of the program's stdout and stderr. After `wait`, `end` says why the program ended, and
    `code` is its exit code.
    """

    def __init__(self, owner: socket.socket, launched: Launched, pipes: list[int], keeper: HostKeeper) -> None:
        self._owner, self._launched, self._keeper = owner, launched, keeper
        self.end, self.code = "exited", 0
        self._most = keeper.settings["output_bytes"]
        self._output = {fd: bytearray() for fd in pipes}
        self._open = set(pipes)
        self._process = os.pidfd_open(launched.pid)
        self._poll = select.poll()
        for fd in (*pipes, self._process):
            self._poll.register(fd, select.POLLIN)
        for fd in pipes:
            os.set_blocking(fd, False)  # non-blocking, because a program can reopen its stdout and take the data away
        self._poll.register(owner, select.POLLRDHUP)

    def wait(self, deadline: float) -> None:
        """Wait until the program ends by itself or is killed at a limit; `deadline` is a `time.monotonic` value."""
        measured = 0.0
        while True:
            now = time.monotonic()
            if self._has_ended(max(0.0, min(POLL_SECONDS, deadline - now))):
                self.code = self._launched.finish()
                break
            with_folder = now - measured > FOLDER_SECONDS
            measured = now if with_folder else measured
            collect_orphans(self._launched.pid)
            full = any(len(output) >= self._most for output in self._output.values())
            excess = "output" if full else self._keeper.find_excess(with_folder=with_folder)
            if excess or now >= deadline:
                self._stop(excess or "timeout")
                break
        os.close(self._process)

    def drain(self) -> tuple[bytes, bytes]:
        """Read the remaining output, without waiting for running child processes; return stdout and stderr."""
        for fd in list(self._open):
            while fd in self._open and len(self._output[fd]) < self._most and self._read(fd):
                pass
            if fd in self._open:
                os.close(fd)
        stdout, stderr = (bytes(output) for output in self._output.values())
        return stdout, stderr

    def _has_ended(self, seconds: float) -> bool:
        """Wait for output or the program's end for at most `seconds`; return True if the program has ended."""
        ended = False
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._owner.fileno():
                raise SystemExit  # the owner is gone
            if fd == self._process:
                ended = True
            elif fd in self._open:
                self._read(fd)
        return ended

    def _read(self, fd: int) -> bool:
        """Read output from a pipe; return False if no output is available."""
        try:
            part = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        self._output[fd] += part[: self._most - len(self._output[fd])]
        if not part:
            self._poll.unregister(fd)
            self._open.remove(fd)
            os.close(fd)
        return bool(part)

    def _stop(self, end: str) -> None:
        """Kill the program and its descendants, and reap the program."""
        self.end = end
        for pid in list_descendants([self._launched.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.code = self._launched.finish()
