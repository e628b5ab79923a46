"""The database that a Prefect server makes at its first start, made once for all tests: half of such a start."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rollflow.flows.services.process import QUIET_PREFECT, without
from tests.support.waiting import RUN_SECONDS


def migrated(folder: Path) -> Path:
    """`folder` with such a database in it. One process of the tests makes it, the others wait."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            environment = without("PREFECT_", os.environ) | QUIET_PREFECT | {"PREFECT_HOME": str(folder)}
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=RUN_SECONDS)
            (folder / "done").touch()
    return folder


def give(made: Path, home: Path) -> None:
    """Put it where the server of `home` looks for its own."""
    (home / "prefect").mkdir(parents=True)
    for file in made.glob("prefect.db*"):
        shutil.copy(file, home / "prefect")
