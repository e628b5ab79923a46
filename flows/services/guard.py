"""Runs a command, and ends all its descendants when the command ends or when the process that started the guard ends.

    python -I -S guard.py GRACE_SECONDS COMMAND [ARGUMENT...]

Guarantees on Linux: the guard ends every descendant of the command as soon as the command ends, the guard gets SIGTERM,
or the guard's owner (the process that started it) dies or closes the guard's standard input. The owner may die by
SIGKILL. Descendants include orphans and processes with a session of their own. The guard first ends the command
(SIGTERM, GRACE_SECONDS), then the other descendants (SIGTERM, `REST_SECONDS`), then all of them by SIGKILL. If the
command ended by itself, its descendants get SIGKILL at once, because nobody waits for their orderly end. No other
process ever gets a signal. The guard's exit code is the command's exit code. The guarantees hold even if the guard
itself gets SIGKILL. At the end the pipe to the guard's standard input breaks, so the owner notices that no process is
left.

Mechanism: the guard is the "child subreaper" of its descendants. An orphan therefore becomes a child of the guard
instead of a child of init, and the guard can find the orphan. A second guard stands between the guard and the command.
Each of the two guards ends all processes below itself when the other guard is gone. A guard costs milliseconds, because
it uses the standard library only and runs as a script. Without a subreaper (macOS), orphans that also left the session
cannot be found.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

REST_SECONDS = 1.5
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform.startswith("linux")


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _read_parents() -> dict[int, int]:
    """Map the process id of every living process to the process id of its parent, without zombies."""
    if not LINUX:
        rows = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        return {int(pid): int(ppid) for pid, ppid in (row.split() for row in rows.splitlines())}
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
            except OSError:  # the process ended meanwhile
                continue
            # in /proc/PID/stat, the text before the last ")" is the process's name, which may contain any character
            state, ppid = stat.rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry)] = int(ppid)
    return parents


def list_descendants(root: int) -> list[int]:
    """Return the process ids of all living descendants of the process `root`."""
    children: dict[int, list[int]] = {}
    for pid, ppid in _read_parents().items():
        children.setdefault(ppid, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Guard:
    """Runs `child()` in a child process, and ends the child's process tree if the process `parent` dies or standard
    input closes.
    """

    def __init__(self, grace_seconds: float, child: Callable[[], NoReturn], parent: int | None = None) -> None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._grace = grace_seconds
        self._parent, self._input = parent, [] if parent else [0]
        self._told_to_stop = False
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the guard handles Ctrl-C
        self._status: int | None = None
        self._root = os.fork()
        if self._root == 0:
            child()

    def _on_term(self, *_: object) -> None:
        self._told_to_stop = True

    def _reap(self) -> None:
        """Reap every ended child process, including orphans that this process has adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._root:
                self._status = status

    def watch(self) -> None:
        """Wait until the guarded command has ended or must be ended."""
        while self._status is None and not self._told_to_stop and self._parent in (None, os.getppid()):
            readable, _, _ = select.select(self._input, [], [], POLL_SECONDS)
            if readable and not os.read(0, 4096):
                return
            self._reap()

    def _wait_for(self, seconds: float, *, only_root: bool) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._reap()
            if self._status is not None and (only_root or not list_descendants(os.getpid())):
                return True
            time.sleep(0.05)
        return False

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def end(self) -> int:
        """End the guarded command's process tree within a bounded time; return the command's exit code."""
        ended = False
        if self._status is None:
            self._signal([self._root], signal.SIGTERM)
            self._wait_for(self._grace, only_root=True)
            self._signal(list_descendants(os.getpid()), signal.SIGTERM)
            ended = self._wait_for(REST_SECONDS, only_root=False)
        deadline = time.monotonic() + KILL_SECONDS
        while not ended and time.monotonic() < deadline:  # the loop repeats, because a dying process may still fork
            self._signal(list_descendants(os.getpid()), signal.SIGKILL)
            ended = self._wait_for(0.2, only_root=False)
        return os.waitstatus_to_exitcode(self._status) if self._status is not None else 1

    def serve(self) -> NoReturn:
        """Wait for the guarded command, end its process tree, and exit with the command's exit code."""
        self.watch()
        code = self.end()
        sys.exit(code if code >= 0 else 128 - code)


def become(command: list[str]) -> NoReturn:
    """Replace this process by the guarded command."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the kernel ends the command if both guards are killed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"the command {command[0]} cannot be run: {error}", file=sys.stderr)
        os._exit(127)


def main() -> None:
    grace, command, first = float(sys.argv[1]), sys.argv[2:], os.getpid()

    def second() -> NoReturn:
        Guard(grace, lambda: become(command), first).serve()

    # The outer guard waits longer, because it notices the end of the inner guard up to `POLL_SECONDS` later.
    Guard(grace + POLL_SECONDS, second).serve()


if __name__ == "__main__":
    main()
