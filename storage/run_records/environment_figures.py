"""Stores counters of what happened in the environments of a run (figures), by kind of environment. There is one object,
`environments/<writer>.json`, for each supervisor that has read the figures from the run's rollout actor.

The figures are only shown to users. The figures of a process may be measured several times, even by several
supervisors. No figure of a process ever decreases, so only the largest measured value of each figure is used. The sums
therefore stay right if a measured process or a supervisor is restarted. What happens in a process after its last
measurement is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import ObjectStore

FOLDER = "environments"


class EnvironmentUse(NamedTuple):
    """The figures (counters by name) of all environments of one kind in one process. The field `process` is an id of
    the process that is unique over all machines and times.
    """

    process: str
    kind: str
    figures: Mapping[str, float]


@dataclass
class EnvironmentUses:
    """The figures (counters by name) of a run's environments, by process and by kind of environment."""

    seen: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def note(self, uses: Iterable[EnvironmentUse]) -> None:
        """Add measured figures; the largest measured value of each figure is kept."""
        for process, kind, figures in uses:
            known = self.seen.setdefault(process, {}).setdefault(kind, {})
            known |= {name: max(value, known.get(name, 0.0)) for name, value in figures.items()}

    def totals(self) -> dict[str, dict[str, float]]:
        """Return the figures of each kind of environment, summed over all processes."""
        found: dict[str, dict[str, float]] = {}
        for kinds in self.seen.values():
            for kind, figures in kinds.items():
                total = found.setdefault(kind, {})
                total |= {name: total.get(name, 0.0) + value for name, value in figures.items()}
        return dict(sorted(found.items()))


SEEN: TypeAdapter[dict[str, dict[str, dict[str, float]]]] = TypeAdapter(dict[str, dict[str, dict[str, float]]])


def store_environment_uses(run: ObjectStore, writer: str, uses: EnvironmentUses) -> None:
    """Store the figures that the process `writer` has read. Store nothing if no environment has figures."""
    if uses.seen:
        run.put(f"{FOLDER}/{writer}.json", json.dumps(uses.seen).encode())


def read_environment_uses(run: ObjectStore) -> EnvironmentUses:
    """Return the figures that all supervisors have stored, merged; a damaged object is skipped."""
    uses = EnvironmentUses()
    for path in run.list(FOLDER):
        try:
            seen = SEEN.validate_json(run.get(path))
        except (ValidationError, Corrupt):
            continue
        for process, kinds in seen.items():
            uses.note(EnvironmentUse(process, kind, figures) for kind, figures in kinds.items())
    return uses
