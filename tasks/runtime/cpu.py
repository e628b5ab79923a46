"""Measures the CPU seconds that a process and its descendants use, for the status of an actor."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from functools import lru_cache

import psutil

from rollflow.storage.run_records.usage import CpuCost

LOOK_SECONDS = 10.0  # seconds between two measurements of the CPU time, because a measurement takes some milliseconds


def own_cost(role: str, process: psutil.Process) -> CpuCost:
    """Measure the CPU seconds of a process without its children; raise `psutil.Error` if the process has ended."""
    used = process.cpu_times()
    return CpuCost(role, _name(process), round(used.user + used.system, 2))


def below_cost(role: str, process: psutil.Process) -> CpuCost:
    """Measure the CPU seconds of all descendants of a process, including those that have ended."""
    ended = process.cpu_times()
    seconds = ended.children_user + ended.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            seconds += sum(child.cpu_times()[:4])
    return CpuCost(role, _name(process), round(seconds, 2))


@lru_cache(maxsize=4096)  # cached, because psutil reports another start time once the system clock was set
def _name(process: psutil.Process) -> str:
    return f"{socket.gethostname()}:{process.pid}:{process.create_time():.2f}"


def name_own_process() -> str:
    """Return an id of this process that is unique over all machines and times."""
    return _name(psutil.Process())


class CpuClock:
    """Measures the CPU seconds of this process, reported as `role`, and of its descendants, reported as `below`."""

    def __init__(self, role: str, below: str = "") -> None:
        self._role, self._below = role, below
        self._looked = float("-inf")
        self._costs: list[CpuCost] = []

    def read(self) -> list[CpuCost]:
        """Return the CPU seconds, measured again if the last measurement is older than `LOOK_SECONDS`."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked, me = time.monotonic(), psutil.Process()
            self._costs = [own_cost(self._role, me)]
            if self._below:
                self._costs.append(below_cost(self._below, me))
        return self._costs
