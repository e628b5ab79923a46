"""What a run has cost in CPU seconds, by role and process: `usage/<writer>.json`, one object for each who looks.

Several observers may see a process many times. It counts once, with the most that any of them saw. So the sum of a role
goes on when its process is replaced, and when an observer is. What a process used after the last look is missing.
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


class Cost(NamedTuple):
    """CPU seconds that one process has used so far. `process` names it for ever, among those of all machines."""

    role: str
    process: str
    seconds: float


@dataclass
class Usage:
    """Role -> process -> CPU seconds."""

    seen: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, costs: Iterable[Cost]) -> None:
        """Take these into account."""
        for role, process, seconds in costs:
            known = self.seen.setdefault(role, {})
            known[process] = max(seconds, known.get(process, 0.0))

    def totals(self) -> dict[str, float]:
        """CPU seconds by role, the largest first."""
        sums = {role: round(sum(processes.values()), 1) for role, processes in self.seen.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def store_usage(run: ObjectStore, writer: str, usage: Usage) -> None:
    """Store what `writer` has seen."""
    run.put(f"usage/{writer}.json", json.dumps(usage.seen).encode())


def read_usage(run: ObjectStore) -> Usage:
    """What all writers have seen; an object that is damaged is passed over."""
    usage = Usage()
    for path in run.list("usage"):
        try:
            seen = SEEN.validate_json(run.get(path))
        except (ValidationError, Corrupt):
            continue
        usage.note(Cost(role, process, s) for role, processes in seen.items() for process, s in processes.items())
    return usage
