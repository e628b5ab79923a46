"""A fork server for `multiprocessing` that is a copy of this process, so that nothing is imported a second time.

Guarantees: the fork server ends with this process, however this process ends. If the fork server dies,
`multiprocessing` itself starts another fork server: a new interpreter that imports the modules `otherwise`. A server
without the preloaded modules starts processes more slowly, but with the same results.

Fork the server right after the imports. Without threads, no thread holds a lock for which the forked copy would wait.
The threads that exist after the imports (of OpenBLAS and jemalloc) handle a fork themselves.
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
PR_SET_NAME = 15  # the number of this option of prctl(2)
ARGUMENTS = 45  # index in /proc/self/stat, after the name, of the begin and end addresses of the command line


def fork_server(otherwise: Sequence[str], *, shown_as: Sequence[str] = ()) -> None:
    """Start the fork server.

    Args:
        otherwise: the modules that a server started by `multiprocessing` imports.
        shown_as: the server's command line; by default the command line of this process.

    Raises:
        RuntimeError: there is a fork server already, or this process has started threads.
    """
    if _server._forkserver_pid is not None or threading.active_count() > 1:
        raise RuntimeError("start the fork server once, before this process starts a thread")
    forkserver.set_forkserver_preload(list(otherwise))
    gc.collect()
    gc.freeze()  # the garbage collector would write to shared memory, and so copy it
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
    """Fork on request until the owner is gone."""
    try:
        with contextlib.suppress(SystemExit):  # the normal end of `main`
            forkserver.main(listener, alive, ())
    finally:
        os._exit(0)  # only the owner may run the exit handlers


def leave_alive_to_owner() -> None:
    """Close the server's pipe in a forked process, because the server lives while any process holds the pipe."""
    os.close(_server._forkserver_alive_fd)


def be_named(*line: str) -> None:
    """Set the command line and the name (15 bytes) of this forked process, if the owner's command line leaves room.

    setproctitle cannot be used: it finds the command line's memory by the first environment variable. If that variable
    was changed since the process started, setproctitle does nothing and raises no error.
    """
    if sys.platform.startswith("linux"):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = map(int, stat[ARGUMENTS : ARGUMENTS + 2])
        if len(text := "\0".join(line).encode()) < end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, Path(line[0]).name.encode(), 0, 0, 0)
