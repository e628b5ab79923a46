"""Stores a description of each version of a run's scorers: one object, `scorers/<section>/<version>.json`, for each
version. The rows of batches store only the scorer version; its description explains the version to users. No decision
of a run depends on the descriptions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore

FOLDER = "scorers"
UNSET = "none"


@dataclass(frozen=True, slots=True)
class ScorerRecord:
    """A version of the scorer that the config section `section` configures, with the description that
    `tasks.scorers.version` made. The field `at` is the time (seconds since the epoch) at which the newest reward actor
    with this scorer version started.
    """

    section: str
    version: str
    described: Mapping[str, Any]
    at: float = 0.0


def store_scorer(run: ObjectStore, record: ScorerRecord) -> None:
    """Store the description of a scorer's version; an older description of the same version is replaced."""
    tree = {**asdict(record), "at": time.time()}
    run.put(f"{FOLDER}/{record.section}/{record.version}.json", json.dumps(tree).encode())


def read_scorers(run: ObjectStore) -> list[ScorerRecord]:
    """Return the descriptions of all scorer versions of a run, the oldest first; damaged objects are skipped."""
    records = []
    for path in run.list(FOLDER):
        try:
            records.append(ScorerRecord(**json.loads(run.get(path))))
        except (Missing, Corrupt, ValueError, TypeError):
            continue
    return sorted(records, key=lambda record: record.at)


def find_change(records: list[ScorerRecord], now: ScorerRecord) -> str:
    """Return a sentence that says how a scorer differs from the scorer that the run used last. Return "" if the scorer
    is unchanged, or if the run has not used a scorer of this config section yet.
    """
    used = [record for record in records if record.section == now.section]
    if not used or used[-1].version == now.version:
        return ""
    before = used[-1]
    changes = _diff(before.described, now.described)
    return f"{now.section}: the scorer has changed from version {before.version} to {now.version} ({changes})"


def _diff(before: Mapping[str, Any], now: Mapping[str, Any], most: int = 3) -> str:
    """Return a text with the first differences between two descriptions of scorers: values of config keys, versions of
    libraries, and names of changed files."""
    old, new = dict(_flatten(before)), dict(_flatten(now))
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    shown = [_describe(name, old.get(name), new.get(name)) for name in names[:most]]
    return ", ".join([*shown, f"and {len(names) - most} more"] if len(names) > most else shown)


def _describe(name: str, before: object, now: object) -> str:
    group, _, place = name.partition(".")
    if group in ("code", "own_code"):
        return f"the file of {place or 'reward.path'}" if group == "own_code" else f"file {place}"
    return f"{place} {UNSET if before is None else before} -> {UNSET if now is None else now}"


def _flatten(tree: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found = list[tuple[str, Any]]()
    for name, value in tree.items():
        place = f"{above}.{name}" if above else name
        found += _flatten(value, place) if isinstance(value, Mapping) else [(place, value)]
    return found
