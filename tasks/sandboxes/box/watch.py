"""Enforces a program's deadline and its limits of memory, processes and output, in the process that supervises the
sandbox.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rollflow.tasks.sandboxes.box.programs import Programs
from rollflow.tasks.sandboxes.box.rights import libc

POLL_SECONDS = 0.02  # seconds between two measurements of a program's memory and processes
SHORT_SECONDS = 0.004  # seconds in which most programs of a few lines end
# numbers of measurements over the memory limit after which processes are killed; a single measurement may be too high
CERTAIN_POLLS, HIDDEN_POLLS = 2, 10
# memory, in KiB, that hidden files may seem to need beyond twice the memory limit
MOST_HIDDEN = 2**19
CHUNK = 65536
NO_CORE = 1  # core file limit in bytes; with 0, the kernel would still start the host's core dump handler
RESIDENT, FILES = b"RssAnon:", b"FDSize:"
# fields of /proc/PID/status for memory that belongs to no file
ANONYMOUS = (RESIDENT, b"RssShmem:", b"VmSwap:", b"HugetlbPages:", b"VmPTE:")
# fields of smaps_rollup in which each page is divided among the processes that share it
SHARED_OUT = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")
SOCKET_KIB = 416  # largest send buffer of a socket in KiB under the kernel's default settings
CORES = os.cpu_count() or 1
COMPARED = 64  # largest number of processes with which a process is compared to find shared memory
KCMP, SAME_MEMORY = {"x86_64": 312, "aarch64": 272}, 1


class Watch:
    """A running program, whose output is read and whose limits are enforced.

    `pipes` are the read ends of the program's stdout and stderr. After `wait`, `end` says why the program ended, `code`
    is its return code, and `output` its stdout and stderr.
    """

    def __init__(
        self, owner: socket.socket, programs: Programs, pid: int, pipes: Iterable[int], limits: dict[str, Any]
    ) -> None:
        self._owner, self._programs, self._pid, self._limits = owner, programs, pid, limits
        self.output = (bytearray(), bytearray())
        self.end = "exited"
        self.code: int | None = None
        self._outputs = {fd: self.output[place] for place, fd in enumerate(pipes)}
        self._process = os.pidfd_open(pid)
        self._poll = select.poll()
        for fd in self._outputs:
            os.set_blocking(fd, False)  # non-blocking, because a program can reopen its stdout and take the data away
        self._poll.register(self._process, select.POLLIN)
        self._poll.register(owner, select.POLLRDHUP)

    def wait(self, deadline: float, *, keep_children: bool) -> None:
        """Wait until the program ends by itself or is killed at a limit; `deadline` is a `time.monotonic` value."""
        now = time.monotonic()
        measure = now + POLL_SECONDS
        # Waiting before reading wakes this process only once, because the output of a short program fits into its
        # pipes.
        self._handle_events(min(SHORT_SECONDS, max(0.0, deadline - now)))
        for fd in self._outputs:
            self._poll.register(fd, select.POLLIN)
        while self.code is None:
            self._handle_events(max(0.0, min(measure, deadline) - time.monotonic()))
            now = time.monotonic()
            if self.code is None and now >= min(measure, deadline):
                self._reap()
                if self.code is None and (excess := "timeout" if now >= deadline else self._find_excess()):
                    self._stop(excess)
                measure = time.monotonic() + POLL_SECONDS
        if not keep_children and self._programs.first and self._programs.list_processes():
            self._programs.kill()
        self._drain()

    def close(self) -> None:
        """Close the file descriptors of this watch."""
        for fd in (*self._outputs, self._process):
            os.close(fd)

    def _handle_events(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._owner.fileno():
                # The process that created the sandbox is gone, so this exit lets the kernel kill all its processes.
                os._exit(0)
            elif fd == self._process:
                self._reap()
            elif fd in self._outputs:
                self._read(fd)

    def _find_excess(self) -> str:
        return find_excess(self._limits, self._programs.list_processes, ".")

    def _reap(self) -> None:
        """Reap ended child processes."""
        self.code = self._programs.reap().get(self._pid, self.code)

    def _read(self, fd: int) -> bool:
        """Read output, and kill the program if its output exceeds the limit; return False if no more output is
        available.
        """
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
        """Kill every process of the sandbox's programs."""
        self.end = end
        self.code = self._programs.kill()[self._pid]

    def _drain(self) -> None:
        """Read the remaining output, without waiting for running child processes."""
        for fd in list(self._outputs):
            while len(self._outputs[fd]) < self._limits["output_bytes"] and self._read(fd):
                pass


@dataclass(frozen=True)
class Usage:
    """The resource usage of a process: memory in KiB, the folders of its threads in /proc, and open files.

    `files` is the number of open files; if they are hidden, `hidden` is an upper bound of their number.
    """

    memory: int
    threads: list[str]
    files: int
    hidden: int


def find_excess(limits: dict[str, Any], list_processes: Callable[[], list[int]], proc: str = "/proc") -> str:
    """Return the limit that the sandbox's processes exceed, "processes" or "memory"; return "" if they exceed
    neither.

    `list_processes` returns the ids of the sandbox's processes, as the mounted file system `proc` shows them.

    Shared memory pages are counted once; of the open files, only sockets are counted. The exact count is slow, so it is
    made only if the sum over all processes exceeds the memory limit. If a process hides its open files or its shared
    pages, all of them are counted. If the memory limit is exceeded only because of hidden files, it must be exceeded in
    all measurements, because a starting process may seem to hide its files.
    """
    most, certain = limits["memory_bytes"] // 1024, 0
    for pause in (0.0, 0.0, *[POLL_SECONDS] * HIDDEN_POLLS):
        time.sleep(pause)
        found = {pid: _measure(f"{proc}/{pid}") for pid in list_processes()}
        if sum(len(usage.threads) for usage in found.values()) > limits["processes"]:
            return "processes"
        hidden = SOCKET_KIB * sum(usage.hidden for usage in found.values())
        if hidden + sum(usage.memory + SOCKET_KIB * usage.files for usage in found.values()) <= most:
            return ""
        exact = _measure_exactly(found, proc)
        if hidden + exact <= most:
            return ""
        certain += exact > most or hidden + exact > 2 * most + MOST_HIDDEN
        if certain == CERTAIN_POLLS:
            break
    return "memory"


def _measure(process: str) -> Usage:
    """Return the resource usage of the process with this folder in /proc; zero for an ended process.

    Every thread of the process is read, because a first thread that has ended reports no memory and no open files.
    """
    threads = [f"{process}/task/{name}" for name in _list(f"{process}/task") or ()]
    lists = [_list(f"{thread}/fd") for thread in threads]
    status = [_read_fields(f"{thread}/status", (*ANONYMOUS, FILES)) for thread in threads]
    files = [fields.pop(FILES, 0) for fields in status]
    alive = next((fields for fields in status if RESIDENT in fields), {})
    hidden = sum(files) if alive and all(names is None for names in lists) else 0
    return Usage(sum(alive.values()), threads, sum(len(names or ()) for names in lists), hidden)


def _measure_exactly(found: dict[int, Usage], proc: str) -> int:
    """Return the memory and the sockets of the given processes in KiB, without hidden files; shared memory counts
    once.
    """
    memory, seen = 0, list[int]()
    for pid, usage in found.items():
        if not any(
            libc.syscall(KCMP[os.uname().machine], pid, other, SAME_MEMORY, 0, 0) == 0 for other in seen[-COMPARED:]
        ):
            seen.append(pid)
            exact = (_read_fields(f"{thread}/smaps_rollup", SHARED_OUT) for thread in usage.threads)
            shared_out = next((sum(fields.values()) for fields in exact if fields), None)
            # The process hides its shared pages, or has ended.
            memory += _measure(f"{proc}/{pid}").memory if shared_out is None else shared_out
    sockets = {link for usage in found.values() for link in _read_links(usage.threads) if link.startswith("socket:")}
    return memory + SOCKET_KIB * len(sockets)


def _read_links(threads: list[str]) -> Iterator[str]:
    """Yield the targets of the open files of the given threads, such as "socket:[123]"."""
    for thread in threads:
        for name in _list(f"{thread}/fd") or ():
            with contextlib.suppress(OSError):
                yield os.readlink(f"{thread}/fd/{name}")


def _list(folder: str) -> list[str] | None:
    """Return the names in a folder of /proc; return None if the process has ended or hides the folder."""
    try:
        return os.listdir(folder)
    except OSError:
        return None


def _read_fields(path: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """Return the named fields of a file of /proc, sizes in KiB; return an empty dict if the process has ended."""
    fields = {}
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            name, _, rest = line.partition(b"\t" if b"\t" in line else b" ")
            if name in names:
                fields[name] = int(rest.split()[0])
    return fields


def limit_program(limits: dict[str, Any], seconds: float) -> None:
    """Limit the CPU time and the file sizes of this process and of its future children.

    `seconds` is the deadline of the program, until which it may use all cores.
    """
    cpu = int(seconds * CORES) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["folder_bytes"], limits["folder_bytes"]))


def set_limits(limits: dict[str, Any]) -> None:
    """Set the limits of this process and its future children, except for CPU time and file sizes."""
    for which, most in (
        # a coarse limit; `find_excess` enforces the exact memory limit
        (resource.RLIMIT_AS, 2 * limits["memory_bytes"] + 2**29),
        # three processes more than the limit, for the supervising processes
        (resource.RLIMIT_NPROC, limits["processes"] + 3),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_MEMLOCK, 2**20),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),  # limit of queued signals and timers
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_CORE, NO_CORE),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
