"""Defines the class `Hostile` of hostile programs, and the code that all hostile programs share."""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, mmap, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    found = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return found if found >= 0 else -ctypes.get_errno()
def escaped(*what):
    print("ESCAPED", *what, flush=True)
def refused(name, number, *arguments):
    found = call(number, *arguments)
    if found not in (-errno.EPERM, -errno.ENOSYS):
        escaped(name, found)
def opens(*paths, flags=os.O_RDONLY):
    for path in paths:
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
        except OSError:
            continue
        escaped(path)
def fails(action, *arguments):
    try:
        found = action(*arguments)
    except (OSError, ValueError, MemoryError):
        return
    escaped(getattr(action, "__name__", action), *arguments, found)
def forks(count, action):
    for _ in range(count):
        if os.fork() == 0:
            try:
                action()
            finally:
                os._exit(0)
"""


@dataclass(frozen=True)
class Hostile:
    """A program that tries to do harm. `seconds` is its deadline, which is short if the program only waits."""

    name: str
    code: str
    seconds: float = 5.0
    machine: str = ""  # the only machine whose system calls the program knows; empty: any

    @property
    def varies(self) -> bool:
        """True if the program may have another effect when it runs as a command or as another user."""
        return self.seconds >= 1 and any(word in self.code for word in ("/proc/", "refused", "fork", "call("))

    @property
    def source(self) -> str:
        """The code of the program after the code that all hostile programs share."""
        return PRELUDE + self.code
