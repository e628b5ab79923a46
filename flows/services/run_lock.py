"""Lets only one command at a time follow a run to its end: `rollflow run` and `rollflow resume` lock a file of the run
home.

Two commands that follow the same run would serve deployments of the same name, and the first to end would delete the
deployments of both. The kernel frees the lock when the process that holds it ends, in any way. Commands of different
run homes are not locked here: of two such commands, the one with the newest claim in the run's log wins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rollflow.flows.services.locks import PROBE_SECONDS, is_held, take_within
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.context import RunContext


@contextlib.contextmanager
def hold_run(home: Path, context: RunContext) -> Iterator[None]:
    """Hold the run's lock during a `with` block, so that no other command of the run home `home` follows the run.

    Raises:
        ConfigError: another command follows the run.
    """
    file = _lock_file(home, context)
    held = take_within(file, PROBE_SECONDS)
    if held is None:
        raise ConfigError(
            f"run {context.run_id} is already running, started by another command of {home} (process "
            f"{_read_holder(file)}); show the run with `rollflow status {context.uri}`, or end it with "
            f"`rollflow stop {context.uri}`"
        )
    try:
        os.ftruncate(held, 0)
        os.write(held, str(os.getpid()).encode())
        yield
    finally:
        os.close(held)


def find_holder(home: Path, context: RunContext) -> str | None:
    """Return the process id of the command of run home `home` that follows the run; None if there is none."""
    file = _lock_file(home, context)
    return _read_holder(file) if file.exists() and is_held(file) else None


def _read_holder(file: Path) -> str:
    return file.read_text() or "unknown"


def _lock_file(home: Path, context: RunContext) -> Path:
    return home / "locks" / f"{context.key}.lock"
