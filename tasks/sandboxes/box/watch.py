"""Enforces a program's deadline and its limits of memory, processes and output, for the keeper of its sandbox."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollflow.tasks.sandboxes.box.rights import libc

POLL_SECONDS = 0.02  # time between two measurements of memory and processes
CHUNK = 65536
NO_CORE = 1  # bytes of a core file; with 0, the kernel would still start the host's program for core files
RESIDENT, FILES = b"RssAnon:", b"FDSize:"
ANONYMOUS = (RESIDENT, b"RssShmem:", b"VmSwap:", b"HugetlbPages:", b"VmPTE:")  # memory of a process that is no file's
SHARED_OUT = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")  # with each page divided among the processes that share it
SOCKET_KIB = 416  # most bytes that a socket holds for its other end, if the kernel's settings are the usual ones
WALL = 0x40000000  # waitpid also collects children that end with another signal than SIGCHLD
COMPARED = 64  # most processes that another is compared with
KCMP, SAME_MEMORY = {"x86_64": 312, "aarch64": 272}, 1


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
        for fd in pipes:
            os.set_blocking(fd, False)  # a program can open its stdout again and read from it
        for fd in (*pipes, self._process):
            self._poll.register(fd, select.POLLIN)
        self._poll.register(owner, select.POLLRDHUP)

    def wait(self, deadline: float, *, keep_children: bool) -> None:
        """Wait until the program has ended, by itself or by a limit; `deadline` is a time of `time.monotonic`."""
        while self.code is None:
            self._handle_events(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
            if self.code is None:
                self.code = collect_ended().get(self._pid)
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
            elif fd in self._outputs:
                self._read(fd)

    def _read(self, fd: int) -> bool:
        """Read output, and stop the program if it has written too much; return False if there is no more output."""
        try:
            part = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not part:
            self._poll.unregister(fd)
            del self._outputs[fd]
            os.close(fd)
            return False
        output, most = self._outputs[fd], self._limits["output_bytes"]
        output += part[: most - len(output)]
        if len(output) == most and self.code is None:
            self._stop("output")
        return True

    def _stop(self, end: str) -> None:
        """Kill every process of the sandbox."""
        self.end = end
        self.code = kill_all()[self._pid]

    def _drain(self) -> None:
        """Read the rest of the output, without waiting for children that live on."""
        for fd in list(self._outputs):
            while len(self._outputs[fd]) < self._limits["output_bytes"] and self._read(fd):
                pass


def kill_all() -> dict[int, int]:
    """Kill and collect every process of this process namespace but process 1, the caller; return their codes."""
    codes: dict[int, int] = {}
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, WALL)  # orphans are children of process 1
        except ChildProcessError:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def collect_ended() -> dict[int, int]:
    """Collect the children of process 1 that have ended, orphans included; return their codes."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG | WALL))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


@dataclass(frozen=True)
class Usage:
    """What one process uses: memory in KiB, and for each thread its folder in /proc and its open files.

    `files` is the number of open files, and `hidden` the most that there may be if the process hides them.
    """

    memory: int
    threads: list[str]
    files: int
    hidden: int


def find_excess(limits: dict[str, Any], pids: list[int] | None = None) -> str:
    """Return "processes" or "memory" if the sandbox's processes exceed that limit, otherwise an empty text.

    `pids` are the sandbox's processes; None means all processes that this process sees.

    Pages that several processes share are counted once, and of the open files only the sockets hold memory. Both take
    longer to measure, so they are measured only if the sum over all processes exceeds the limit. A process may hide
    its files, and how it shares its pages; then all count.
    """
    found = {pid: _measure(pid) for pid in (list_processes() if pids is None else pids)}
    if sum(len(usage.threads) for usage in found.values()) > limits["processes"]:
        return "processes"
    most = limits["memory_bytes"] // 1024
    if sum(usage.memory + SOCKET_KIB * (usage.files + usage.hidden) for usage in found.values()) <= most:
        return ""
    exceeds = (_measure_exactly(found) > most for _ in range(2))  # again: while a child ends, its pages count twice
    return "memory" if all(exceeds) else ""


def list_processes() -> list[int]:
    """Return the ids of all processes of this process namespace but process 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _measure(pid: int) -> Usage:
    """Measure a process; a process that has ended uses nothing.

    The first thread of a process may have ended before the others, and then it has no memory and no open files.
    """
    threads = [f"/proc/{pid}/task/{name}" for name in _list(f"/proc/{pid}/task") or ()]
    lists = [_list(f"{thread}/fd") for thread in threads]
    status = [_read_fields(f"{thread}/status", (*ANONYMOUS, FILES)) for thread in threads]
    files = [fields.pop(FILES, 0) for fields in status]
    alive = next((fields for fields in status if RESIDENT in fields), {})
    hidden = sum(files) if alive and all(names is None for names in lists) else 0
    return Usage(sum(alive.values()), threads, sum(len(names or ()) for names in lists), hidden)


def _measure_exactly(found: dict[int, Usage]) -> int:
    """Return the memory of these processes in KiB; memory that several of them share counts once."""
    memory, seen = 0, list[int]()
    for pid, usage in found.items():
        if not any(
            libc.syscall(KCMP[os.uname().machine], pid, other, SAME_MEMORY, 0, 0) == 0 for other in seen[-COMPARED:]
        ):
            seen.append(pid)
            exact = (_read_fields(f"{thread}/smaps_rollup", SHARED_OUT) for thread in usage.threads)
            shared_out = next((sum(fields.values()) for fields in exact if fields), None)
            memory += _measure(pid).memory if shared_out is None else shared_out  # or it has ended in the meantime
    sockets = {link for usage in found.values() for link in _read_links(usage.threads) if link.startswith("socket:")}
    return memory + SOCKET_KIB * (len(sockets) + sum(usage.hidden for usage in found.values()))


def _read_links(threads: list[str]) -> Iterator[str]:
    """Return the files that these threads have open."""
    for thread in threads:
        for name in _list(f"{thread}/fd") or ():
            with contextlib.suppress(OSError):
                yield os.readlink(f"{thread}/fd/{name}")


def _list(folder: str) -> list[str] | None:
    """List a folder of /proc; return None if the process has ended or hides the folder."""
    try:
        return os.listdir(folder)
    except OSError:
        return None


def _read_fields(path: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """Read these fields of a file of /proc; sizes are in KiB, and a process that has ended has no fields."""
    fields = {}
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            name, _, rest = line.partition(b"\t" if b"\t" in line else b" ")
            if name in names:
                fields[name] = int(rest.split()[0])
    return fields


def limit_program(limits: dict[str, Any], seconds: float) -> None:
    """Limit the CPU time and the file sizes of this process and of each process that it will start.

    `seconds` is the program's deadline; a process may compute on all cores until then.
    """
    cpu = int(seconds * (os.cpu_count() or 1)) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["folder_bytes"], limits["folder_bytes"]))


def set_limits(limits: dict[str, Any]) -> None:
    """Set the limits of this process and of the processes that it will start, except for time and file sizes."""
    for which, most in (
        (resource.RLIMIT_AS, 2 * limits["memory_bytes"] + 2**29),  # `find_excess` holds the real limit
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # holds for every user but root
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_MEMLOCK, 2**20),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),  # signals in queues, and timers
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_CORE, NO_CORE),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
