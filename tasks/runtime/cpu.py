"""Measures the CPU seconds of a process and of its descendants, which an actor reports in its status."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from functools import lru_cache

import psutil

from rollflow.storage.run_records.usage import CpuCost

LOOK_SECONDS = 10.0  # seconds between two measurements, because a measurement takes some milliseconds


def own_cost(role: str, process: psutil.Process) -> CpuCost:
    """Measure the CPU seconds of a process without its children; raise `psutil.Error` if it has ended."""
    used = process.cpu_times()
    return CpuCost(role, _name(process), round(used.user + used.system, 2))


def below_cost(role: str, process: psutil.Process) -> CpuCost:
    """Measure the CPU seconds of all descendants of a process, both living and ended."""
    ended = process.cpu_times()
    seconds = ended.children_user + ended.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            seconds += sum(child.cpu_times()[:4])
    return CpuCost(role, _name(process), round(seconds, 2))


@lru_cache(maxsize=4096)  # cached, because psutil reports another start time after the system clock was set
def _name(process: psutil.Process) -> str:
    return f"{socket.gethostname()}:{process.pid}:{process.create_time():.2f}"


class CpuClock:
    """Measures the CPU seconds of this process, for the role `role`, and of its descendants, for the role `below` if
    given.
    """

    def __init__(self, role: str, below: str = "") -> None:
        self._role, self._below = role, below
        self._looked = float("-inf")
        self._costs: list[CpuCost] = []

    def read(self) -> list[CpuCost]:
        """Return the last measurement; first measure again if `LOOK_SECONDS` have passed."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked, me = time.monotonic(), psutil.Process()
            self._costs = [own_cost(self._role, me)]
            if self._below:
                self._costs.append(below_cost(self._below, me))
        return self._costs
