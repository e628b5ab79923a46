"""Finds Ray worker processes that died before they registered with Ray. Without this module, Ray would wait ten minutes
for such a worker process, and the actor would not start meanwhile.

    worker begins --> imports --> registers as `ray::...`
                        |
                        +-- dies: a file in the cluster's folder, named by the worker's process id
                                  --> `explain_lost_worker`, once

The worker writes the file itself if it can (`ray_worker`, which knows the error). If the worker cannot write the file,
`WorkerWatch` in the raylet's parent process notices that the worker is gone, and writes the file. `explain_lost_worker`
reads the file, if the environment names the folder.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from rollflow.tasks.actors.early_imports import KIND

# variable with the folder for records of dead Ray workers; the module `ray_worker` repeats this name
FOLDER = "ROLLFLOW_LOST_WORKERS"
WORKER = Path(__file__).with_name("ray_worker.py")
READ = ".read"
LOOK_SECONDS = 0.5
FRESH_SECONDS = 900.0  # seconds after which the death of a Ray worker is no longer reported


class WorkerWatch:
    """Finds worker processes of a raylet (Ray's process on a node) that end before they register with Ray."""

    def __init__(self, raylet: int, folder: Path) -> None:
        self._raylet, self._folder, self._looked = raylet, folder, 0.0
        self._starting: dict[int, str] = {}  # process id of a starting Ray worker -> kind of actor that it is for
        self._known: set[int] = set()  # process ids of registered Ray workers, and of processes that are not workers

    def look(self) -> None:
        """Record the Ray workers that ended since the last call. This method may be called often, because a call is
        cheap.
        """
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        living = _list_children(self._raylet)
        self._known &= living
        for pid in living - self._known:
            self._classify(pid)
        for pid in self._starting.keys() - living:
            note_death(self._folder, pid, self._starting.pop(pid), "its process ended")

    def _classify(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # a zombie has no command line
                self._known.add(pid)
                if pid in self._starting:
                    note_death(self._folder, pid, self._starting.pop(pid), "its process ended")
                return
            line = process.cmdline()
            if line and line[0].startswith("ray::"):
                self._known.add(pid)
                self._starting.pop(pid, None)
            # A new process may not have its environment yet, because Ray forks before it executes the worker.
            elif str(WORKER) in line:
                self._starting[pid] = process.environ().get(KIND, "")


def note_death(folder: Path, pid: int, kind: str, why: str) -> None:
    """Record the death of a Ray worker in a file, unless its death is already recorded."""
    file = folder / str(pid)
    if file.exists() or file.with_suffix(READ).exists():
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{kind}\n{why}")


def explain_lost_worker(kind: str) -> str:
    """Return the reason why a Ray worker for this kind of actor died before it registered; report each death only once.
    If no Ray worker of this kind died, or if another worker of this kind is starting, return "".
    """
    for file in list_deaths():
        with contextlib.suppress(OSError):
            found, _, why = file.read_text().partition("\n")
            if found != kind or time.time() - file.stat().st_mtime > FRESH_SECONDS:
                continue
            if _is_starting(kind, file.parent):
                return ""
            file.rename(file.with_suffix(READ))
            return f"a Ray worker (process {file.name}) died before Ray registered it: {why}; see {file.parents[1]}"
    return ""


def list_deaths() -> list[Path]:
    """List the record files of dead Ray workers that `explain_lost_worker` has not returned yet."""
    named = os.environ.get(FOLDER)
    with contextlib.suppress(OSError):
        return [file for file in sorted(Path(named).iterdir()) if file.suffix != READ] if named else []
    return []


def _is_starting(kind: str, folder: Path) -> bool:
    """Return whether a Ray worker for this kind of actor is starting or idle."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and (str(WORKER) in line or line[0] == "ray::IDLE"):
                environment = process.environ()
                if environment.get(KIND, "") == kind and environment.get(FOLDER) == str(folder):
                    return True
    return False


def _list_children(pid: int) -> set[int]:
    """Return the process ids of a process's children, as listed in /proc."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, file.read_text().split()))
    return found
