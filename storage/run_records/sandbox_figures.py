"""Stores counters of what happened in the sandboxes of a run: one object, `sandboxes/<writer>.json`, for each
supervisor. The counters are only shown to users. If a process was measured several times, only the measurement with the
most events is used. The sums therefore stay right after a restart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import ObjectStore

FOLDER = "sandboxes"
KILLS = ("timeout", "memory", "processes", "output", "folder")  # names of the limits at which programs are killed
# Programs are counted by their time: bucket n has the times from SHORTEST * GROWTH ** (n - 1) to SHORTEST * GROWTH ** n
BUCKETS, SHORTEST, GROWTH = 160, 0.001, 1.1
Key = TypeVar("Key", str, int)


@dataclass(slots=True)
class SandboxFigures:
    """Counters of the sandboxes of one kind.

    `started` counts new sandboxes, and `renewed` counts sandboxes that were emptied for the next program. `replaced`
    counts sandboxes that were replaced by new ones, by the reason for the replacement. `ends` counts programs by how
    they ended, and `failures` counts programs without a result, because their sandbox failed. `times` counts the
    programs that ended by bucket of wall seconds, and `seconds` is the sum of their wall seconds. `in_use` is the
    number of sandboxes that run a program or belong to an open workspace now.
    """

    started: int = 0
    renewed: int = 0
    replaced: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    seconds: float = 0.0
    times: dict[int, int] = field(default_factory=dict)
    in_use: int = 0

    @property
    def programs(self) -> int:
        """The number of programs that have ended."""
        return sum(self.ends.values())

    @property
    def events(self) -> int:
        """The number of counted events, which grows with each measurement of a process."""
        return self.started + self.renewed + self.failures + self.programs + sum(self.replaced.values())

    def find_quantile(self, share: float) -> float | None:
        """Return the wall seconds that the fraction `share` of the programs did not exceed, with an error of about 5%.
        Return None if no program has ended.

        Times below 1 ms count as 1 ms.
        """
        left = share * sum(self.times.values())
        for bucket in sorted(self.times):
            left -= self.times[bucket]
            if left <= 0:
                return SHORTEST * math.pow(GROWTH, min(bucket, BUCKETS - 1) - 0.5 if bucket else 0.0)
        return None

    def __add__(self, other: SandboxFigures) -> SandboxFigures:
        """Return the sums of the counters of two processes."""
        return SandboxFigures(
            self.started + other.started,
            self.renewed + other.renewed,
            _add(self.replaced, other.replaced),
            _add(self.ends, other.ends),
            self.failures + other.failures,
            self.seconds + other.seconds,
            _add(self.times, other.times),
            self.in_use + other.in_use,
        )


def find_bucket(seconds: float) -> int:
    """Return the bucket of a program's wall seconds in `SandboxFigures.times`."""
    if seconds <= SHORTEST:
        return 0
    return min(math.ceil(math.log(seconds / SHORTEST) / math.log(GROWTH)), BUCKETS - 1)


class SandboxUse(NamedTuple):
    """The counters of all sandboxes of one kind in one process. The field `process` is an id of the process that is
    unique over all machines and times.
    """

    process: str
    kind: str
    figures: SandboxFigures


@dataclass
class SandboxUses:
    """The counters of a run's sandboxes, by process and by kind of sandbox."""

    seen: dict[str, dict[str, SandboxFigures]] = field(default_factory=dict)

    def note(self, uses: Iterable[SandboxUse]) -> None:
        """Add measured counters; for each process and kind, the measurement with the most events is kept."""
        for process, kind, figures in uses:
            known = self.seen.setdefault(process, {})
            if kind not in known or known[kind].events <= figures.events:
                known[kind] = figures

    def note_all(self, uses: Iterable[SandboxUse]) -> None:
        """Add the newest counters of all processes that have not ended; all other processes use no sandbox any more."""
        uses = list(uses)
        for process in self.seen.keys() - {use.process for use in uses}:
            self.seen[process] = {kind: replace(one, in_use=0) for kind, one in self.seen[process].items()}
        self.note(uses)

    def totals(self) -> dict[str, SandboxFigures]:
        """Return the counters of each kind of sandbox that the run has used, summed over all processes."""
        found: dict[str, SandboxFigures] = {}
        for kinds in self.seen.values():
            for kind, figures in kinds.items():
                found[kind] = found.get(kind, SandboxFigures()) + figures
        return dict(sorted(found.items()))


SEEN: TypeAdapter[dict[str, dict[str, SandboxFigures]]] = TypeAdapter(dict[str, dict[str, SandboxFigures]])


def store_sandbox_uses(run: ObjectStore, writer: str, uses: SandboxUses) -> None:
    """Store the counters that the process `writer` has read. Store nothing if the run has used no sandbox."""
    if uses.seen:
        seen = {name: {kind: asdict(one) for kind, one in kinds.items()} for name, kinds in uses.seen.items()}
        run.put(f"{FOLDER}/{writer}.json", json.dumps(seen).encode())


def read_sandbox_uses(run: ObjectStore) -> SandboxUses:
    """Return the merged counters of all supervisors; a damaged object is skipped. The number of sandboxes in use is set
    to 0, because the stored number is out of date.
    """
    uses = SandboxUses()
    for path in run.list(FOLDER):
        try:
            seen = SEEN.validate_json(run.get(path))
        except (ValidationError, Corrupt):
            continue
        for process, kinds in seen.items():
            uses.note(SandboxUse(process, kind, replace(figures, in_use=0)) for kind, figures in kinds.items())
    return uses


def list_figures(figures: SandboxFigures) -> dict[str, float]:
    """Return the counters of one kind of sandbox as numbers by name, for MLflow, Prometheus and the summary."""
    kills = {f"killed_{end}": count for end, count in figures.ends.items() if end in KILLS}
    replaced = {f"replaced_{reason.replace(' ', '_')}": count for reason, count in figures.replaced.items()}
    times = {name: figures.find_quantile(share) for name, share in (("median_seconds", 0.5), ("p99_seconds", 0.99))}
    return {
        "started": float(figures.started),
        "renewed": float(figures.renewed),
        "replaced": float(sum(figures.replaced.values())),
        "programs": float(figures.programs),
        "failures": float(figures.failures),
        **{name: float(count) for name, count in (kills | replaced).items()},
        "seconds": round(figures.seconds, 3),
        **{name: round(found, 4) for name, found in times.items() if found is not None},
        "in_use": float(figures.in_use),
    }


def _add(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    return dict(Counter(one) + Counter(other))
