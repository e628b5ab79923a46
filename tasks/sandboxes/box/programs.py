"""Lists, reaps and kills the processes of a sandbox's programs, from outside their process namespace."""

from __future__ import annotations

import contextlib
import os
import signal

WALL = 0x40000000  # makes waitpid also reap children whose exit signal is not SIGCHLD
KEEPER = 1  # process id of the supervising process in its process namespace
EXITING = 4  # flag in /proc/PID/stat of a process that is ending


class Programs:
    """The processes in the namespace of process `first`.

    The working folder of the calling process is the /proc of its own process namespace.
    """

    def __init__(self, holder: int) -> None:
        self._holder, self.first = holder, 0  # there is no namespace yet

    def list_processes(self) -> list[int]:
        """Return the ids of all processes in the namespace except its first process."""
        others = (KEEPER, self._holder, self.first)
        return [pid for name in os.listdir(".") if name.isdigit() and (pid := int(name)) not in others]

    def reap(self) -> dict[int, int]:
        """Reap ended child processes, and return their exit codes by process id; exit if the namespace has ended."""
        codes: dict[int, int] = {}
        while (found := os.waitpid(-1, os.WNOHANG | WALL))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
        if self._holder in codes or self.first in codes:  # killed from outside of the sandbox
            os._exit(1)
        return codes

    def kill(self) -> dict[int, int]:
        """Kill and reap every process in the namespace; return the exit codes of child processes by process id."""
        codes: dict[int, int] = {}
        if self.first:
            os.kill(self.first, signal.SIGKILL)
        while self.first and self.first not in codes:  # wait for the first process, which ends after all others
            pid, status = os.waitpid(-1, WALL)
            codes[pid] = os.waitstatus_to_exitcode(status)
        if self._holder in codes:
            os._exit(1)
        self.first = 0
        return codes

    def is_ending(self) -> bool:
        """Return whether the first process of the namespace was killed, which no process in the namespace can do."""
        with contextlib.suppress(OSError), open(f"{self.first}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & EXITING)
        return True
