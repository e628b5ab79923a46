"""Stores the run times from which the adaptive deadlines of test cases are computed: `case_anchors/<section>.json` for
each scorer.

After a restart, the reward actor (the Ray actor that scores responses) computes the deadlines of test cases from the
stored run times. If the record of run times is missing, damaged or old, the deadlines of some test cases begin again at
the maximum, so no program is killed too early. A score that an adaptive deadline of a test case decided says so, and
names the deadline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore


@dataclass(slots=True)
class CaseAnchors:
    """The longest seconds of correct programs (`T_anchor`) by row and test case, and counts of early kills.

    A row is named by a hash of its content; cases count from 0. An early kill is a run of a program that an adaptive
    deadline ended before the maximum. `rechecked` counts the early kills that ran again with the maximum, and
    `false_kills` those of them that passed.
    """

    rows: dict[str, dict[int, float]] = field(default_factory=dict)
    kills: int = 0
    rechecked: int = 0
    false_kills: int = 0

    def list_row(self, row: str) -> Mapping[int, float]:
        """Return the anchors of a row by case; a case without a correct program has no anchor."""
        return self.rows.get(row, {})

    def raise_row(self, row: str, seconds: Mapping[int, float]) -> None:
        """Raise the anchors of a row to these seconds, rounded up to 10 ms; an anchor is never lowered."""
        for case, measured in seconds.items():
            known = self.rows.setdefault(row, {})
            known[case] = max(math.ceil(measured * 100) / 100, known.get(case, 0.0))

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps(
            {"rows": self.rows, "kills": self.kills, "rechecked": self.rechecked, "false_kills": self.false_kills}
        ).encode()


RECORD: TypeAdapter[CaseAnchors] = TypeAdapter(CaseAnchors)


def anchors_path(section: str) -> str:
    """Return the path of the record of the scorer that this section of the recipe configures."""
    return f"case_anchors/{section}.json"


def store_anchors(run: ObjectStore, section: str, record: bytes) -> None:
    """Store the anchors of a scorer, encoded; the scorer's earlier record is replaced."""
    run.put(anchors_path(section), record)


def read_anchors(run: ObjectStore, section: str) -> CaseAnchors:
    """Read the anchors of a scorer; a missing or damaged record counts as empty."""
    try:
        found = RECORD.validate_json(run.get(anchors_path(section)))
    except (Missing, Corrupt, ValidationError):
        return CaseAnchors()
    finite = all(math.isfinite(s) and s >= 0 for row in found.rows.values() for s in row.values())
    return found if finite else CaseAnchors()
