"""Runs a command in a pseudo-terminal, types keys as a user does, and reads the text that a user would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from struct import pack

import psutil

from tests.support.waiting import HANG_SECONDS

CTRL_C, CTRL_D = "\x03", "\x04"
MARKS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")  # colours, cursor movements and carriage returns


@dataclass
class Terminal:
    """A running command and its terminal. `shown` is all text so far, without colours."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = ""
    read: int = 0  # position after the text that was awaited last

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C while the command waits for a key. If the signal arrives while Python's line editor processes a
        key, the editor notices the signal only at the next key.
        """
        limit = time.monotonic() + HANG_SECONDS
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < limit, f"does not wait for a key; shown: {self.shown}"
        self.type(CTRL_C)

    def await_text(self, text: str) -> str:
        """Wait until the text appears after the text that was awaited before. Return all text up to it."""
        limit = time.monotonic() + HANG_SECONDS
        while (at := self.shown.find(text, self.read)) < 0:
            assert time.monotonic() < limit, f"waited for {text!r}; shown: {self.shown}"
            if not self._follow(1.0):
                assert text in self.shown[self.read :], f"ended without {text!r}; shown: {self.shown}"
        before, self.read = self.shown[self.read : at], at + len(text)
        return before

    def end(self) -> int:
        """Wait for the end of the command; return its exit code."""
        limit = time.monotonic() + HANG_SECONDS
        while self._follow(1.0):
            assert time.monotonic() < limit, f"still running; shown: {self.shown}"
        return self.process.wait(HANG_SECONDS)

    def _follow(self, seconds: float) -> bool:
        """Read the text that is shown next. Return False if the command has closed the terminal."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            found = os.read(self.master, 65536)
        except OSError:  # Linux reports the end of the last process like this.
            return False
        self.shown += MARKS.sub("", found.decode(errors="replace"))
        return bool(found)


def _control_terminal() -> None:
    """Let Ctrl-C interrupt the command, also if a shell started the tests in the background, without the signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(*arguments: str, env: Mapping[str, str] | None = None, columns: int = 80) -> Iterator[Terminal]:
    """Run `rollflow` with these arguments in a separate terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, pack("HHHH", 40, columns, 0, 0))
    variables = {**os.environ, "TERM": "xterm", **(env or {})}
    variables.pop("COLUMNS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "rollflow.flows.commands.cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=variables,
        start_new_session=True,
        preexec_fn=_control_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)
