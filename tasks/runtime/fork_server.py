"""The fork server of `multiprocessing` as a copy of this process: what this one has imported is not imported again.

Guarantees: it ends with this process, however that ends. In the place of one that died `multiprocessing` itself starts
another, a new interpreter that imports what `otherwise` names: slower, and otherwise the same.

To be forked right after the imports. Then no thread holds a lock that the copy would wait for: those that are there
(OpenBLAS's, jemalloc's) take care of themselves when their process forks.
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
PR_SET_NAME = 15  # of prctl(2)
ARGUMENTS = 45  # where in /proc/self/stat, behind the name, the begin and end of the command line's memory stand


def fork_server(otherwise: Sequence[str], *, shown_as: Sequence[str] = ()) -> None:
    """Start it; `otherwise` names the modules that one would import that takes its place.

    `shown_as` is its command line, else this process's.

    Raises:
        RuntimeError: there is one, or this process has begun threads.
    """
    if _server._forkserver_pid is not None or threading.active_count() > 1:
        raise RuntimeError("a fork server is a copy of a process that has just begun, and there is one of it")
    forkserver.set_forkserver_preload(list(otherwise))
    gc.collect()
    gc.freeze()  # memory stays shared as long as nobody writes to it, as the collector does
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
    """Fork whenever asked to, until nobody is left to ask."""
    try:
        with contextlib.suppress(SystemExit):  # how it ends
            forkserver.main(listener, alive, ())
    finally:
        os._exit(0)  # what is to be done at the end of this process is its owner's


def leave_alive_to_owner() -> None:
    """In a process that the server forked: the server lives while anybody holds its pipe, and only the owner is to."""
    os.close(_server._forkserver_alive_fd)


def be_named(*line: str) -> None:
    """Have this process, a copy, show a command line of its own, where that of its owner leaves room for it.

    And a name, that of the program in it: its first 15 bytes. setproctitle looks for the place beside the first
    variable of the environment. Where that one was set anew since the start, it finds none and says nothing.
    """
    if sys.platform.startswith("linux"):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = map(int, stat[ARGUMENTS : ARGUMENTS + 2])
        if len(text := "\0".join(line).encode()) < end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, Path(line[0]).name.encode(), 0, 0, 0)
