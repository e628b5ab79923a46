"""Stores in the run home (rollflow's folder of local files) the last status of each run that this machine has seen. The
stored status is shown if the run's own storage does not answer. Each run has a small file, whose name is a hash of the
run's address.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from rollflow.flows.views.status import RunStatus

FOLDER = "seen"


@dataclass(frozen=True, slots=True)
class LastStatus:
    """The last seen status of a run, and its age in seconds."""

    status: RunStatus
    age: float


def save_last_status(home: Path, uri: str, status: RunStatus, age: float = 0.0) -> None:
    """Store a run's status in the run home (rollflow's folder of local files). `uri` names the run; the status is `age`
    seconds old. If the run home cannot be written, do nothing.
    """
    file = _file(home, uri)
    new = file.with_suffix(f".{os.getpid()}.new")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(status.to_json())
        written = time.time() - age
        os.utime(new, (written, written))
        new.replace(file)


def read_last_status(home: Path, uri: str | None, store: str | None = None) -> LastStatus | None:
    """Return the last seen status of the run at `uri`. If `uri` is None, return the newest status of all runs, or of
    the runs in `store`.
    """
    files = [_file(home, uri)] if uri else list((home / FOLDER).glob("*.json"))
    found = [seen for file in files if (seen := _read(home, file, store)) is not None]
    return min(found, key=lambda seen: seen.age, default=None)


def _read(home: Path, file: Path, store: str | None) -> LastStatus | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        status = RunStatus.from_json(file.read_text())
        if store is None or file == _file(home, f"{store.rstrip('/')}/runs/{status.run_id}"):
            return LastStatus(status, max(0.0, time.time() - file.stat().st_mtime))
    return None


def _file(home: Path, uri: str) -> Path:
    return home / FOLDER / f"{hashlib.sha256(uri.rstrip('/').encode()).hexdigest()[:16]}.json"
