"""Stores the CPU seconds that the processes of a run have used: one object, `usage/<writer>.json`, for each process
that measures. The numbers are only shown to users. If a process was measured several times, only the largest
measurement is used. The sums therefore stay right after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import ObjectStore

SEEN: TypeAdapter[dict[str, dict[str, float]]] = TypeAdapter(dict[str, dict[str, float]])


class CpuCost(NamedTuple):
    """The CPU seconds that one process has used so far; the number is only shown to users. The field `process` is an id
    of the process that is unique over all machines and times.
    """

    role: str
    process: str
    seconds: float


@dataclass
class CpuUsage:
    """The CPU seconds of a run's processes, by the role of the process, such as learner."""

    seen: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, costs: Iterable[CpuCost]) -> None:
        """Add measured CPU times; for each process, the largest measurement is kept."""
        for role, process, seconds in costs:
            known = self.seen.setdefault(role, {})
            known[process] = max(seconds, known.get(process, 0.0))

    def totals(self) -> dict[str, float]:
        """Return the CPU seconds of each role, such as the learner, the largest number first."""
        sums = {role: round(sum(processes.values()), 1) for role, processes in self.seen.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def store_usage(run: ObjectStore, writer: str, usage: CpuUsage) -> None:
    """Store the CPU times that the process `writer` has measured."""
    run.put(f"usage/{writer}.json", json.dumps(usage.seen).encode())


def read_usage(run: ObjectStore) -> CpuUsage:
    """Return the merged CPU times of all measuring processes; a damaged object is skipped."""
    usage = CpuUsage()
    for path in run.list("usage"):
        try:
            seen = SEEN.validate_json(run.get(path))
        except (ValidationError, Corrupt):
            continue
        usage.note(CpuCost(role, process, s) for role, processes in seen.items() for process, s in processes.items())
    return usage
