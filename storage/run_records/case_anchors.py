"""Stores run times of correct programs, one object `case_anchors/<section>.json` for each scorer. The adaptive
deadlines of test cases are computed from these run times. A restarted reward actor (the Ray actor that scores
responses) reads the stored run times; otherwise, deadlines would begin again at the maximum.
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
    """The longest run time of correct programs (`T_anchor`, in seconds) for each test case, and counts of programs
    killed early.

    A row of the dataset is named by a hash of its content, and the row's test cases are numbered from 0. An early kill
    is a run of a program that an adaptive deadline ended before the maximum run time. The field `rechecked` counts the
    killed programs that ran again with the maximum deadline, and `false_kills` counts how many of these programs
    passed.
    """

    rows: dict[str, dict[int, float]] = field(default_factory=dict)
    kills: int = 0
    rechecked: int = 0
    false_kills: int = 0

    def list_row(self, row: str) -> Mapping[int, float]:
        """Return the longest run time of correct programs for each test case of a row; a test case without a correct
        program is left out.
        """
        return self.rows.get(row, {})

    def raise_row(self, row: str, seconds: Mapping[int, float]) -> None:
        """Raise the longest run times of a row's test cases to the given seconds, rounded up to 10 ms. No run time is
        lowered.
        """
        for case, measured in seconds.items():
            known = self.rows.setdefault(row, {})
            known[case] = max(math.ceil(measured * 100) / 100, known.get(case, 0.0))

    def merge_rows(self, rows: Mapping[str, Mapping[int, float]]) -> None:
        """Raise the longest run times to those of another process's record, without rounding; no run time is
        lowered."""
        for row, seconds in rows.items():
            known = self.rows.setdefault(row, {})
            for case, longest in seconds.items():
                known[case] = max(longest, known.get(case, 0.0))

    def select_news(self, known: CaseAnchors) -> dict[str, dict[int, float]]:
        """Return the rows in which a test case has a longer run time than in the record `known`."""
        return {
            row: dict(seconds)
            for row, seconds in self.rows.items()
            if any(longest > known.list_row(row).get(case, -1.0) for case, longest in seconds.items())
        }

    def encode(self) -> bytes:
        """Return the run times and counts as JSON."""
        return json.dumps(
            {"rows": self.rows, "kills": self.kills, "rechecked": self.rechecked, "false_kills": self.false_kills}
        ).encode()


RECORD: TypeAdapter[CaseAnchors] = TypeAdapter(CaseAnchors)


def anchors_path(section: str) -> str:
    """Return the path of the stored run times of the scorer in the given section of the config."""
    return f"case_anchors/{section}.json"


def read_anchors(run: ObjectStore, section: str) -> CaseAnchors:
    """Read the stored run times of a scorer; a missing or damaged record counts as empty."""
    try:
        found = RECORD.validate_json(run.get(anchors_path(section)))
    except (Missing, Corrupt, ValidationError):
        return CaseAnchors()
    finite = all(math.isfinite(s) and s >= 0 for row in found.rows.values() for s in row.values())
    return found if finite else CaseAnchors()
