"""Starts a fork server for `multiprocessing` as a copy of this process, so that no module is imported a second time.

The fork server ends with the process that started it, even if that process is killed. If the fork server dies,
`multiprocessing` starts a new interpreter that imports the modules in `otherwise`.

The fork server must be started before the process starts threads. If a process with threads is copied, the copy may
wait forever for a lock that a thread has acquired.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NoReturn

_server: Any = forkserver._forkserver
PR_SET_NAME = 15  # number of the prctl(2) option that sets the name of a process
# index of the command line's begin address in /proc/self/stat, counted after the process's name; the end address
# follows
ARGUMENTS = 45


def fork_server(otherwise: Sequence[str], *, shown_as: Sequence[str] = ()) -> None:
    """Start the fork server.

    Args:
        otherwise: these modules are imported if `multiprocessing` must start another fork server.
        shown_as: this is the fork server's command line; by default the command line of this process.

    Raises:
        RuntimeError: this process already has a fork server, or has started threads.
    """
    if _server._forkserver_pid is not None or threading.active_count() > 1:
        raise RuntimeError("the fork server must be started only once, and before this process starts a thread")
    forkserver.set_forkserver_preload(list(otherwise))
    gc.collect()
    # Without this call, the garbage collector would write to memory that is shared with the fork, and so copy it.
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            if shown_as:
                be_named(*shown_as)
            _serve(listener.detach(), alive)
        os.close(alive)
    _server._forkserver_address, _server._forkserver_alive_fd, _server._forkserver_pid = address, ours, pid


def _serve(listener: int, alive: int) -> NoReturn:
    """Fork processes on request until the process that started the fork server has ended."""
    try:
        with contextlib.suppress(SystemExit):  # the normal end of `main`
            forkserver.main(listener, alive, ())
    finally:
        os._exit(0)  # exit handlers may run only in the process that started the fork server


def leave_alive_to_owner() -> None:
    """Close the fork server's pipe in a forked process, because the server runs while any process has the pipe open."""
    os.close(_server._forkserver_alive_fd)


def be_named(*line: str) -> None:
    """Set the name (at most 15 bytes) of this forked process, and its command line if there is room for it.

    The package setproctitle does nothing if the first environment variable was changed since the process started.
    """
    if sys.platform.startswith("linux"):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = map(int, stat[ARGUMENTS : ARGUMENTS + 2])
        if len(text := "\0".join(line).encode()) < end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, Path(line[0]).name.encode(), 0, 0, 0)
