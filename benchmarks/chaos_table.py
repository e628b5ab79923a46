"""Builds the table of `benchmarks.chaos`, with one row for each role whose processes were killed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.report import Row
from benchmarks.victims import RECORDED_AS
from rollflow.tasks.run.config import RecoveryConfig

EVERYTHING = "everything"
TARGET_SECONDS = 10.0
RESTARTS = 1000  # largest number of restarts that each role may have in these runs


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: the seconds until the next version was published, and until the recovery of the killed role was
    complete.
    """

    role: str
    to_version: float
    to_progress: float
    recorded: bool | None = None  # whether storage has the recovery; None: recoveries of this role are not recorded


@dataclass(slots=True)
class Outcome:
    """One run: its end, and the findings of its audit."""

    engine: str
    kills: list[Kill]
    right: bool
    trained: int = 0  # `trained`, `lost` and `doubled` are numbers of trajectories
    lost: int = 0
    doubled: int = 0
    violations: list[str] = field(default_factory=list)
    regenerated: dict[str, int] = field(default_factory=dict)


def table_of(engine: str, outcomes: Sequence[Outcome]) -> tuple[Table, list[Row]]:
    """Return the table with one row per role, and the same values as benchmark rows."""
    trained, usual = sum(outcome.trained for outcome in outcomes), RecoveryConfig().restarts
    title = f"chaos, {engine} engine: {trained:,} trajectories; {RESTARTS} restarts a role allowed (default {usual})"
    table = Table(title=title, title_justify="left")
    for name in (
        "role",
        "kills",
        "own record",
        "runs right",
        "to a version, median",
        "to progress, median",
        "worst",
        "lost",
    ):
        table.add_column(name, justify="left" if name == "role" else "right")
    table.add_column("doubled", justify="right")
    table.add_column("regenerated", justify="right")
    rows: list[Row] = []
    for role in dict.fromkeys(k.role for o in outcomes for k in o.kills):
        runs = [o for o in outcomes if any(k.role == role for k in o.kills)]
        made = [k for o in outcomes for k in o.kills if k.role == role]
        regenerated = sum(o.regenerated.get(name, 0) for o in outcomes for name in _recovered_as(role))
        figures = {
            "kills": float(len(made)),
            "with a recovery of its own on record": float(sum(k.recorded is True for k in made)),
            "runs": float(len(runs)),
            "runs that ended right": float(sum(o.right for o in runs)),
            "seconds to a version, median": statistics.median(k.to_version for k in made),
            "seconds to progress, median": statistics.median(k.to_progress for k in made),
            "seconds to progress, worst": max(k.to_progress for k in made),
            "trajectories lost": float(sum(o.lost for o in runs)),
            "trajectories doubled": float(sum(o.doubled for o in runs)),
            "trajectories regenerated": float(regenerated),
        }
        for name, value in figures.items():
            target = TARGET_SECONDS if name == "seconds to progress, median" and role != EVERYTHING else None
            rows.append(Row(f"{engine}: {role}", name, value, target, value <= target if target else None))
        table.add_row(
            role,
            f"{len(made)}",
            "-" if role not in RECORDED_AS else f"{sum(k.recorded is True for k in made)}",
            f"{figures['runs that ended right']:.0f}/{len(runs)}",
            *(f"{figures[name]:.1f}" for name in list(figures)[4:7]),
            *(f"{figures[name]:.0f}" for name in list(figures)[7:]),
        )
    return table, rows


def _recovered_as(role: str) -> tuple[str, ...]:
    """Return the names under which a role's recoveries report regenerated trajectories."""
    return {"scheduler": ("rollout",)}.get(role, ())
