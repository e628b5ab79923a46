"""Ensures by a file lock that only one command (`rollflow run` or `rollflow resume`) of a run home at a time manages a
run. Two commands with the same run would serve Prefect deployments of the same name, and the first to end would delete
both. If commands of two run homes manage the same run, the command that recorded itself last in the run's log
continues.
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
    """Hold the run's file lock during a `with` block, so that no other command in the run home `home` manages the run.

    Raises:
        ConfigError: another command manages the run.
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
    """Return the process id of the command that manages the run from the run home `home`; None if no command does."""
    file = _lock_file(home, context)
    return _read_holder(file) if file.exists() and is_held(file) else None


def _read_holder(file: Path) -> str:
    return file.read_text() or "unknown"


def _lock_file(home: Path, context: RunContext) -> Path:
    return home / "locks" / f"{context.key}.lock"
