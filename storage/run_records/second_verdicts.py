"""Stores how often the second verdict on a response differed from the first one, as `second_verdicts/<section>.json`
for each scorer.

The counts are kept when the reward actor (the Ray actor that scores responses) is restarted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore

FOLDER = "second_verdicts"


@dataclass(slots=True)
class SecondVerdictCounts:
    """Counts for one version of a scorer: responses that were judged twice, and responses whose two verdicts differ."""

    version: str = ""
    verdicts: int = 0
    flips: int = 0

    def add(self, version: str, *, is_flip: bool) -> None:
        """Count a second verdict. If the present counts belong to another version of the scorer, drop them first."""
        if version != self.version:
            self.version, self.verdicts, self.flips = version, 0, 0
        self.verdicts += 1
        self.flips += is_flip

    def merge_news(self, now: SecondVerdictCounts, before: SecondVerdictCounts) -> None:
        """Add the verdicts that another process counted between its counts `before` and `now`. If `now` belongs to
        another version of the scorer, drop the present counts first.
        """
        if now == before:
            return
        if now.version != self.version:
            self.version, self.verdicts, self.flips = now.version, 0, 0
        old = before if before.version == now.version else SecondVerdictCounts()
        self.verdicts += now.verdicts - old.verdicts
        self.flips += now.flips - old.flips

    def encode(self) -> bytes:
        """Return the counts as JSON."""
        return json.dumps(asdict(self)).encode()


RECORD: TypeAdapter[SecondVerdictCounts] = TypeAdapter(SecondVerdictCounts)


def counts_path(section: str) -> str:
    """Return the path where the counts of the scorer in the given section of the config are stored."""
    return f"{FOLDER}/{section}.json"


def read_counts(run: ObjectStore, section: str) -> SecondVerdictCounts:
    """Read the stored counts of a scorer; a missing or damaged record counts as empty."""
    try:
        found = RECORD.validate_json(run.get(counts_path(section)))
    except (Missing, Corrupt, ValidationError):
        return SecondVerdictCounts()
    return found if 0 <= found.flips <= found.verdicts else SecondVerdictCounts()


def read_all_counts(run: ObjectStore) -> dict[str, SecondVerdictCounts]:
    """Return the counts of each scorer that has given a second verdict, by its section of the config."""
    sections = [path.removeprefix(f"{FOLDER}/").removesuffix(".json") for path in run.list(FOLDER)]
    counts = {section: read_counts(run, section) for section in sorted(sections)}
    return {section: one for section, one in counts.items() if one.verdicts}
