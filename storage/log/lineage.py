"""Finds out from a run's log what happened to each dispatch of a prompt, and which entry published a version.

A dispatch is in flight from its issue until it is discarded or committed in a batch. A committed dispatch waits until
a version is trained on it. If a batch is voided, its dispatches are quarantined and their prompts are issued again.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollflow.storage.errors import Missing
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, VersionPublished, WrittenEntry
from rollflow.storage.log.reading import get_entry, iterate_written
from rollflow.storage.log.run_log import Log
from rollflow.storage.records import Discard, DiscardReason, GroupKey


@dataclass(frozen=True, slots=True)
class Consumed:
    """A dispatch that `version` was trained on, as part of batch `version - 1`."""

    version: int

    def __str__(self) -> str:
        return f"trained into version {self.version}"


@dataclass(frozen=True, slots=True)
class AwaitingTraining:
    """A dispatch that is committed in a batch and waits to be trained on."""

    batch: int

    def __str__(self) -> str:
        return f"committed in batch {self.batch}, which waits for the learner"


@dataclass(frozen=True, slots=True)
class Discarded:
    """A dispatch that was discarded when batch `batch` was formed."""

    batch: int
    discard: Discard

    def __str__(self) -> str:
        lost = self.discard
        return (
            f"discarded as {lost.reason} when batch {self.batch} was formed; started under version "
            f"{lost.started_version}; {lost.response_tokens} response tokens"
        )


@dataclass(frozen=True, slots=True)
class InFlight:
    """A dispatch that was neither committed nor discarded when batch `batch`, the newest batch, was formed."""

    batch: int

    def __str__(self) -> str:
        return f"in flight when batch {self.batch}, the newest batch, was formed"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A dispatch that was committed in batch `batch` before that batch was voided; the dispatch's prompt is issued
    again.
    """

    batch: int

    def __str__(self) -> str:
        return f"in batch {self.batch}, which was quarantined; the prompt was issued again"


Fate = Consumed | AwaitingTraining | Discarded | InFlight | Quarantined


def list_fates(log: Log, prompt: int) -> dict[GroupKey, Fate]:
    """Return what happened to each dispatch of a prompt, first dispatch first, according to the log entries read so
    far.

    The function reads the log from entry 0 until the prompt was trained on or filtered, or until the log's end.

    Raises:
        Corrupt: an entry is missing or damaged.
    """
    found: dict[GroupKey, Fate] = {}
    committed: dict[int, GroupKey] = {}  # entry that committed a batch -> the prompt's dispatch in that batch
    newest = -1
    for stored in iterate_written(log, 0, log.state.n):
        match stored.entry.body:
            case BatchCommitted(number, groups=groups, discards=discards):
                newest = max(newest, number)
                found |= {lost.key: Discarded(number, lost) for lost in discards if lost.key.prompt == prompt}
                for key in (group.key for group in groups if group.prompt == prompt):
                    found[key], committed[stored.entry.n] = AwaitingTraining(number), key
                if any(lost.key.prompt == prompt and lost.reason is DiscardReason.FILTERED for lost in discards):
                    return found
            case BatchVoided(number, entry) if entry in committed:
                found[committed[entry]] = Quarantined(number)
            case VersionPublished(number, batch_entry) if batch_entry in committed:
                return found | {committed[batch_entry]: Consumed(number)}
    if prompt in log.state.open:
        found[GroupKey(prompt, log.state.open[prompt])] = InFlight(newest)
    return found


def find_version(log: Log, version: int) -> WrittenEntry:
    """Find the entry that published a version, with one read if the version is recent, else by bisection of the log.

    Raises:
        Missing: no entry read so far publishes this version.
        Corrupt: an entry that the search must read is missing or damaged.
    """
    state = log.state
    if not 0 <= version <= state.version:
        raise Missing(f"{log.store.uri} has no version {version}; its newest version is {state.version}")
    if version in state.held:  # always true for the newest version
        return get_entry(log, next(iter(state.held[version].values())))
    low, high = 0, state.published  # entry `low` is before the version's publication, entry `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        if get_entry(log, middle).entry.version < version:
            low = middle
        else:
            high = middle
    return get_entry(log, high)
