"""Runs a session: a shell or a Python interpreter in a sandbox that keeps its state between runs.

A session writes the exit code of each run to a separate pipe, so that output is never mistaken for the end of a run.

If a run takes too long or prints too much, the session is interrupted as by Ctrl-C, and keeps its state. A session that
ignores the interrupt is killed, and the next run starts a new session. A run is also interrupted if its caller stops
it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from typing import Any

from rollflow.tasks.sandboxes.box.tree import list_descendants
from rollflow.tasks.sandboxes.box.wire import CHUNK
from rollflow.tasks.sandboxes.guest.process import GuestProcess, kill_processes

NOT_STARTED = 127  # exit code for a command that does not exist, as in a shell
SOON = 0.01  # seconds between two writes of a long input
STOP_SECONDS, STOPS = 0.4, 5  # seconds that a run may take to end after an interrupt, and largest number of interrupts
PYTHON = ("python3", "-X", "utf8")
Header = dict[str, Any]
# The generator of a request yields file descriptors and a time, and is resumed with the ready descriptors.
Work = Generator[tuple[Sequence[int], float], set[int], Any]

SHELL_START = "set +H +o history; unset HISTFILE"
# This program runs inside the sandbox, so it may execute any code of the policy. It imports only small
# modules: `ast`, `json` and `traceback` take as long to import as the interpreter takes to start.
PYTHON_START = r"""
import _ast, os, signal, sys
orders, answers = os.fdopen(int(sys.argv[1]), "rb"), int(sys.argv[2])
for fd in (orders.fileno(), answers):
    os.set_inheritable(fd, False)
me, space = os.getpid(), {"__name__": "__main__", "__builtins__": __builtins__}
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = [""]
sys.path.insert(0, "")
def run(code):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tree = compile(code, "<session>", "exec", _ast.PyCF_ONLY_AST)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, "<session>", "exec"), space)
    if last is not None:
        sys.displayhook(eval(compile(_ast.Expression(last.value), "<session>", "eval"), space))
for line in orders:
    number, length = map(int, line.split())
    code, status = orders.read(length).decode(errors="surrogatepass"), 0
    try:
        try:
            run(code)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status, trace = 1, error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != "<session>":
            trace = trace.tb_next
        sys.__excepthook__(type(error), BaseException.with_traceback(error, trace), trace)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass
    if os.getpid() != me:
        os._exit(status & 255)
    os.write(answers, b"%d %d\n" % (number, status))
"""


class GuestSession:
    """A shell or a Python interpreter that keeps its variables between runs."""

    def __init__(self, roots: set[int], request: Header) -> None:
        self._roots, self._opened = roots, request
        self._process: GuestProcess | None = None
        self._orders = self._statuses = -1  # pipes: code for the Python process, and exit codes from it
        self._number_in_shell = -1  # file descriptor of the pipe for exit codes in the shell
        self._number = self._last = 0  # number of the current run, and exit code of the previous run
        self._statement = bytearray()
        self._is_over = False  # True once the write end of the pipe for exit codes is closed
        self.is_busy = self.is_stopped = False
        self.request = 0  # number of the request whose code runs

    def run(self, request: Header) -> Work:
        """Run code in the session; yield what the run waits for, and return the header and the body of the answer."""
        self.is_busy, self.is_stopped, self.request, began = True, False, request["number"], time.monotonic()
        try:
            if self._process is None:
                yield from self._start(request)
            self._number += 1
            end, code = yield from self._run(request["code"], began + request["timeout"], request["most"])
        except OSError as error:
            self.close()
            return self._describe("exited", NOT_STARTED, f"the session has ended: {error}", began), str(error).encode()
        finally:
            self.is_busy = False
        lost = ""
        assert self._process is not None
        (output,) = self._process.take_output(request["most"])
        if self._process.has_ended() or code is None:
            ended = self._process.has_ended()
            lost = "the session's process ended" if ended else "the session did not stop, and was killed"
            killed = self.close()
            code = killed if code is None else code
        self._last = code
        return self._describe(end, code, lost, began), output

    def close(self) -> int:
        """Kill the session's process and its descendants, except those that have detached; return the exit code."""
        if (process := self._process) is None:
            return 0
        self._process = None
        process.kill()
        for fd in {self._orders, self._statuses} - {-1}:
            os.close(fd)
        self._orders = self._statuses = -1
        return process.collect()

    def _describe(self, end: str, code: int, lost: str, began: float) -> Header:
        return {"end": end, "code": code, "lost": lost, "seconds": time.monotonic() - began}

    def _start(self, request: Header) -> Work:
        """Start the process of the session."""
        self._statuses, statuses = os.pipe()
        os.set_blocking(self._statuses, False)
        self._statement.clear()
        self._last, self._is_over = 0, False
        try:
            if self._opened["kind"] == "python":
                orders, self._orders = os.pipe()
                try:
                    command = [*PYTHON, "-c", PYTHON_START, str(orders), str(statuses)]
                    self._process = GuestProcess(self._roots, command, self._opened, 1, pass_fds=(orders, statuses))
                finally:
                    os.close(orders)
                return
            command = ["bash", "--noprofile", "--norc", "--noediting", "-i"]
            shell = {**self._opened, "env": {"PS1": "", "PS2": "", **self._opened["env"]}}
            more = {"stdin": subprocess.PIPE, "bufsize": 0, "pass_fds": (statuses,)}
            self._process = GuestProcess(self._roots, command, shell, 1, **more)
            self._number_in_shell = statuses
        finally:
            os.close(statuses)
        self._number += 1
        first = "\n".join([SHELL_START, *self._opened["start"]])
        yield from self._run(first, time.monotonic() + request["timeout"], request["most"])
        self._process.take_output(request["most"])  # an interactive shell warns that it has no terminal

    def _run(self, code: str, deadline: float, most: int) -> Work:
        """Send code to the session and wait until the code has run; return why the run ended, and its exit code (None
        if unknown).
        """
        assert self._process is not None
        data = memoryview(self._write_order(code))
        fd = self._orders if self._orders >= 0 else self._process.stdin.fileno()  # type: ignore[union-attr]
        os.set_blocking(fd, False)
        end, process, limit, stops = "exited", self._process, deadline, 0
        before = set(list_descendants([process.pid]))
        while True:
            if self.is_stopped and end == "exited":
                limit = time.monotonic()
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                data = data[os.write(fd, data) :] if data else data
            ready = yield [*process.fds, self._statuses], min(limit, time.monotonic() + SOON) if data else limit
            fits = process.read(most)
            if (status := self._read_status()) is not None:
                return end, status
            if process.ended in ready or self._is_over:
                yield [process.ended], time.monotonic() + STOP_SECONDS  # the process ends soon after its pipe closes
                return end, None
            if time.monotonic() >= limit or (end == "exited" and not fits):
                if stops == STOPS:
                    return end, None
                end = end if end != "exited" else "timeout" if fits else "output"
                self._stop(before if stops else None)
                limit, stops = time.monotonic() + STOP_SECONDS, stops + 1

    def _stop(self, before: set[int] | None) -> None:
        """Interrupt the run; with `before`, also kill descendants of the session that are not in `before`."""
        assert self._process is not None
        if before is not None:
            kill_processes(set(list_descendants([self._process.pid])) - before)
        self._process.signal_group(signal.SIGINT)

    def _write_order(self, code: str) -> bytes:
        if self._orders >= 0:
            data = code.encode(errors="surrogatepass")
            return b"%d %d\n" % (self._number, len(data)) + data
        status = self._number_in_shell
        again = f"(exit {self._last}); " if self._last else ""  # set $? to the exit code of the previous run
        run = f"{again}eval {shlex.quote(code)} </dev/null {status}>&-"
        return f"{run}\nprintf '%s %s\\n' {self._number} $? >&{status}\n".encode(errors="surrogateescape")

    def _read_status(self) -> int | None:
        """Return the exit code of the current run, if the session has written it."""
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._statuses, CHUNK)
            self._is_over = not part
            self._statement += part
        while b"\n" in self._statement:
            line, _, rest = self._statement.partition(b"\n")
            self._statement = bytearray(rest)
            number, _, status = line.partition(b" ")
            if number == b"%d" % self._number and status.lstrip(b"-").isdigit():
                return int(status)
        if len(self._statement) > CHUNK:
            self._statement.clear()
        return None
