"""Locks files in the run home (rollflow's folder of local files), so that only one process at a time does a task. The
kernel releases a lock when the last process that holds it ends, even if the process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rollflow.storage.errors import ConfigError

POLL_SECONDS = 0.05


PROBE_SECONDS = 0.2  # seconds within which a process that only tests a file lock releases it


def take(file: Path, *, shared: bool = False) -> int | None:
    """Lock a file without waiting; return the open file descriptor, or None if another process holds the lock.

    Raises:
        ConfigError: the file cannot be created or locked.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{str(file)!r} cannot be written ({error.strerror}); set ROLLFLOW_HOME to a folder that can be written"
        ) from error
    try:
        fcntl.flock(held, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError as error:  # for example, the folder is on a network disk that does not support locks
        os.close(held)
        raise ConfigError(
            f"{str(file)!r} cannot be locked ({error.strerror}); set ROLLFLOW_HOME to a folder on a disk of "
            "this machine"
        ) from error
    return held


def take_within(file: Path, seconds: float, *, shared: bool = False) -> int | None:
    """Lock a file, retrying for `seconds` while another process holds the lock."""
    limit = time.monotonic() + seconds
    while (held := take(file, shared=shared)) is None and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
    return held


def is_held(file: Path) -> bool:
    """Return whether a process holds an exclusive lock on the file."""
    held = take(file, shared=True)
    if held is not None:
        os.close(held)
    return held is None


def await_free(file: Path, seconds: float) -> bool:
    """Wait until no process holds the file's lock; return False after `seconds`."""
    limit = time.monotonic() + seconds
    while is_held(file):
        if time.monotonic() > limit:
            return False
        time.sleep(POLL_SECONDS)
    return True


@contextlib.contextmanager
def one_at_a_time(file: Path, seconds: float = 30.0) -> Iterator[None]:
    """Hold the file's lock during a short `with` block, which takes milliseconds.

    Raises:
        TimeoutError: another process has held the lock for `seconds`.
    """
    if (held := take_within(file, seconds)) is None:
        raise TimeoutError(f"another process still holds the lock {file} after {seconds:g} s")
    try:
        yield
    finally:
        os.close(held)
