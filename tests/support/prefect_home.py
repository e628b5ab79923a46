"""Copies the database that a Prefect server creates at its first start to the run homes of tests.

The database is created once for all tests, because its creation takes half of a server's start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollflow.flows.services.process import QUIET_PREFECT, PrefectServer, drop_prefix
from tests.support.waiting import RUN_SECONDS


def migrated(folder: Path) -> Path:
    """Return `folder` with a Prefect database. One test process creates the database, and the others wait."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            environment = drop_prefix("PREFECT_", os.environ) | QUIET_PREFECT | {"PREFECT_HOME": str(folder)}
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=RUN_SECONDS)
            (folder / "done").touch()
    return folder


@contextmanager
def served(home: Path, made: Path) -> Iterator[PrefectServer]:
    """Start a server with this home and a copy of the database; clients of this process use it."""
    give(made, home)
    with PrefectServer(home) as server, use_server(server):
        yield server


@contextmanager
def use_server(server: PrefectServer) -> Iterator[PrefectServer]:
    """Let the clients of this process use a server."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    auth = server.env["PREFECT_API_AUTH_STRING"]
    with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_API_AUTH_STRING: auth}):
        yield server


def give(made: Path, home: Path) -> None:
    """Copy the database to the path at which the server of `home` looks for it."""
    (home / "prefect").mkdir(parents=True)
    for file in made.glob("prefect.db*"):
        shutil.copy(file, home / "prefect")
