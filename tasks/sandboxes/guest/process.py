"""Starts, reads and kills child processes of the process that runs commands inside a sandbox."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollflow.tasks.sandboxes.box.tree import list_descendants
from rollflow.tasks.sandboxes.box.wire import CHUNK

READS = 16  # largest number of chunks that are read from one process before other processes are served


class GuestProcess:
    """A child process in a Unix session of its own, with the output that it has written."""

    def __init__(
        self, roots: set[int], command: Sequence[str], request: Mapping[str, Any], outputs: int, **more: Any
    ) -> None:
        """Start the process; `outputs` is 2 for separate pipes of stdout and stderr, or 1 for a common pipe.

        `roots` is the set of the ids of all started child processes; `collect` removes this process from the set.

        Raises:
            OSError: the process cannot be started.
        """
        pipes = [os.pipe() for _ in range(outputs)]
        options = {"stdin": subprocess.DEVNULL, "cwd": request["cwd"], "env": {**os.environ, **request["env"]}, **more}
        try:
            self._popen = subprocess.Popen(
                command, stdout=pipes[0][1], stderr=pipes[-1][1], start_new_session=True, **options
            )
        except BaseException:
            for reading, _ in pipes:
                os.close(reading)
            raise
        finally:
            for _, writing in pipes:
                os.close(writing)
        self._roots, self.pid, self.stdin = roots, self._popen.pid, self._popen.stdin
        self.ended = os.pidfd_open(self.pid)
        self._outputs = {reading: bytearray() for reading, _ in pipes}
        self._open = set(self._outputs)
        for fd in self._open:
            os.set_blocking(fd, False)
        roots.add(self.pid)

    @property
    def fds(self) -> list[int]:
        """The file descriptors that become readable when the process writes output or ends."""
        return [*self._open, self.ended]

    def read(self, most: int) -> bool:
        """Read the available output, and store at most `most` bytes of each stream; return False if output was
        dropped.
        """
        fits = True
        for fd in list(self._open):
            output = self._outputs[fd]
            with contextlib.suppress(BlockingIOError):
                for _ in range(READS):
                    if not (part := os.read(fd, CHUNK)):
                        self._open.remove(fd)
                        break
                    fits &= len(part) <= most - len(output)
                    output += part[: most - len(output)]
        return fits

    def take_output(self, most: int) -> list[bytes]:
        """Return the output read so far, and clear the buffers."""
        self.read(most)
        taken = [bytes(output) for output in self._outputs.values()]
        for output in self._outputs.values():
            output.clear()
        return taken

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._popen.poll() is not None

    def kill(self) -> None:
        """Kill the process, its process group and its descendants.

        A descendant in another process group survives if its parent has ended.
        """
        kill_descendants([self.pid])
        self.signal_group(signal.SIGKILL)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and to all processes of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def collect(self) -> int:
        """Reap the process, which has ended or was killed, and return its exit code."""
        code = self._popen.wait()
        self._roots.discard(self.pid)
        for fd in (*self._outputs, self.ended):
            os.close(fd)
        if self.stdin:
            with contextlib.suppress(OSError):
                self.stdin.close()
        return code


def kill_descendants(pids: list[int]) -> None:
    """Kill the given processes and all their descendants."""
    kill_processes(list_descendants(pids))


def kill_processes(pids: Iterable[int]) -> None:
    """Kill the given processes; ignore those that have already ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
