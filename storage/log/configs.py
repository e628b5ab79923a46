"""Lists the configs of a run: the run's first config, and one config for each log entry that changed the config.

    entry 0         RunCreated       from version 0 on
    entry 41        ConfigChanged    from version 7 on     differences(before, after): [("versions", 6, 9)]

The run's state lists the log entries that contain the configs (`RunState.configs`). The module `rules` says to which
log entries each config applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import Change, ConfigChanged, Entry, RunCreated, decode, entry_path
from rollflow.storage.log.reading import get_entry, read_entries
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class RecordedConfig:
    """A config of the run, which log entry `entry` recorded. The field `version` is the first policy version that was,
    or will be, trained under this config.
    """

    entry: int
    version: int
    config: Mapping[str, Any]
    sha256: str
    at: float  # seconds since the epoch
    changes: tuple[Change, ...] = ()  # the changed keys; empty for the first config
    who: str = ""

    @classmethod
    def of(cls, entry: Entry) -> RecordedConfig:
        """Read the config that a log entry contains; raise `Corrupt` if the entry contains none."""
        match entry.body:
            case RunCreated() as body:
                return cls(entry.n, 0, body.config, body.config_sha256, entry.at)
            case ConfigChanged() as body:
                return cls(entry.n, body.version, body.config, body.config_sha256, entry.at, body.changes, body.who)
        raise Corrupt(f"log entry {entry_path(entry.n)} should contain a config, but contains none")


def recorded_configs(log: Log) -> list[RecordedConfig]:
    """Return all configs of a run, oldest first, from the log entries that were read so far.

    Raises:
        Corrupt: a log entry that recorded a config is missing or damaged.
    """
    return [RecordedConfig.of(get_entry(log, place.entry).entry) for place in log.state.configs]


def readable_configs(run: ObjectStore) -> list[RecordedConfig]:
    """Return those configs of a run that can be read from a damaged log; the result is only for display."""
    return [RecordedConfig.of(entry) for entry in _readable(run) if isinstance(entry.body, RunCreated | ConfigChanged)]


def _readable(run: ObjectStore) -> Iterator[Entry]:
    for n, found in read_entries(run):
        if isinstance(found, bytes):
            try:
                yield decode(found, n, run.get).entry
            except Corrupt:
                continue


def diff_trees(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> tuple[Change, ...]:
    """List the differences between two configs, sorted by dotted key; None stands for a missing value."""
    found: list[Change] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += diff_trees(old, new, f"{prefix}{name}.")
        elif (old, type(old)) != (new, type(new)):
            found.append(Change(f"{prefix}{name}", old, new))
    return tuple(found)
