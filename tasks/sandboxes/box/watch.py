"""Watches a program for the keeper of its sandbox: its deadline, its memory, its processes, its output."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any

POLL_SECONDS = 0.02  # time between two measurements of memory and processes
CHUNK = 65536
ANONYMOUS = (b"RssAnon:", b"RssShmem:")  # memory of a process that is no file's
SHARED_OUT = (b"Pss_Anon:", b"Pss_Shmem:")  # the same, with each page divided among the processes that share the page
THREADS = b"Threads:"


class Watch:
    """One running program, seen from the keeper, which is process 1 of the sandbox.

    `pipes` are the ends from which stdout and stderr are read. After `wait`, `end` says why the program ended, `code`
    is its return code and `output` what it wrote.
    """

    def __init__(self, owner: socket.socket, pid: int, pipes: list[int], limits: dict[str, Any]) -> None:
        self._owner, self._pid, self._limits = owner, pid, limits
        self.output = (bytearray(), bytearray())
        self.end = "exited"
        self.code: int | None = None
        self._outputs = {fd: self.output[place] for place, fd in enumerate(pipes)}
        self._process = os.pidfd_open(pid)
        self._poll = select.poll()
        for fd in (*pipes, self._process):
            self._poll.register(fd, select.POLLIN)
        self._poll.register(owner, select.POLLRDHUP)

    def wait(self, deadline: float, *, keep_children: bool) -> None:
        """Wait until the program has ended, by itself or by a limit; `deadline` is a time of `time.monotonic`."""
        while self.code is None:
            self._handle_events(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
            if self.code is None and time.monotonic() >= deadline:
                self._stop("timeout")
            elif self.code is None and (excess := find_excess(self._limits)):
                self._stop(excess)
        if not keep_children:
            kill_all()
        self._drain()
        for fd in (*self._outputs, self._process):
            os.close(fd)

    def _handle_events(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._owner.fileno():
                os._exit(0)  # the owner is gone; the kernel kills all processes of the sandbox
            elif fd == self._process:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                self._poll.unregister(fd)
            elif fd in self._outputs:
                self._read(fd)

    def _read(self, fd: int) -> None:
        """Read output, and stop the program if it has written too much."""
        part = os.read(fd, CHUNK)
        if not part:
            self._poll.unregister(fd)
            del self._outputs[fd]
            os.close(fd)
            return
        output, most = self._outputs[fd], self._limits["output_bytes"]
        output += part[: most - len(output)]
        if len(output) == most and self.code is None:
            self._stop("output")

    def _stop(self, end: str) -> None:
        """Kill every process of the sandbox."""
        self.end = end
        self.code = os.waitstatus_to_exitcode(kill_all()[self._pid])
        self._poll.unregister(self._process)

    def _drain(self) -> None:
        """Read the rest of the output, without waiting for children that live on."""
        for fd in list(self._outputs):
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                while fd in self._outputs and len(self._outputs[fd]) < self._limits["output_bytes"]:
                    self._read(fd)


def kill_all() -> dict[int, int]:
    """Kill and collect every process of this process namespace but process 1, the caller; return their statuses."""
    statuses: dict[int, int] = {}
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)  # orphans are children of process 1
        except ChildProcessError:
            return statuses
        statuses[pid] = status


def find_excess(limits: dict[str, Any]) -> str:
    """Return "processes" or "memory" if the sandbox's processes exceed that limit, otherwise an empty text.

    Pages that several processes share are counted once, which takes longer to measure; this is done only if the sum
    over all processes exceeds the limit. A process may hide how it shares its pages; then all its pages count.
    """
    found = {pid: _read_fields(f"/proc/{pid}/status", (*ANONYMOUS, THREADS)) for pid in list_processes()}
    threads = [fields.pop(THREADS, 0) for fields in found.values()]
    if sum(threads) > limits["processes"]:
        return "processes"
    most = limits["memory_bytes"] // 1024
    if sum(sum(fields.values()) for fields in found.values()) <= most:
        return ""
    exact = [_read_fields(f"/proc/{pid}/smaps_rollup", SHARED_OUT) or fields for pid, fields in found.items()]
    return "memory" if sum(sum(fields.values()) for fields in exact) > most else ""


def list_processes() -> list[int]:
    """Return the ids of all processes of this process namespace but process 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _read_fields(path: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """Read these fields of a file of /proc; sizes are in KiB, and a process that has ended has no fields."""
    fields = {}
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            name, _, rest = line.partition(b"\t" if b"\t" in line else b" ")
            if name in names:
                fields[name] = int(rest.split()[0])
    return fields


def set_limits(limits: dict[str, Any], seconds: float) -> None:
    """Set the limits of this process and of the processes that it will start."""
    for which, most in (
        (resource.RLIMIT_AS, 2 * limits["memory_bytes"] + 2**29),  # `find_excess` holds the real limit
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # holds for every user but root
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["folder_bytes"]),
        (resource.RLIMIT_CPU, int(seconds) + 2),
        (resource.RLIMIT_MEMLOCK, 2**20),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
