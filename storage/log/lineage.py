"""Finds in a run's log what became of each dispatch (attempt to answer a prompt), and which entry published a policy
version. A dispatch is in flight, waits in a committed batch, was trained on, was discarded, or was in a batch that was
voided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollflow.storage.errors import Missing
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, VersionPublished, WrittenEntry
from rollflow.storage.log.reading import get_entry, iterate_written
from rollflow.storage.log.run_log import Log
from rollflow.storage.records import Discard, DiscardReason, GroupKey, UnjudgedResponse


@dataclass(frozen=True, slots=True)
class Consumed:
    """A dispatch of a prompt whose responses policy version `version` was trained on, as part of batch
    `version - 1`."""

    version: int

    def __str__(self) -> str:
        return f"trained into version {self.version}"


@dataclass(frozen=True, slots=True)
class AwaitingTraining:
    """A dispatch of a prompt whose responses are committed in a batch and wait to be trained on."""

    batch: int

    def __str__(self) -> str:
        return f"committed in batch {self.batch}, which waits for the learner"


@dataclass(frozen=True, slots=True)
class Discarded:
    """A dispatch of a prompt whose responses were discarded when batch `batch` was formed."""

    batch: int
    discard: Discard
    why: str = ""  # why a response could not be judged; "" in the log of an earlier release

    def __str__(self) -> str:
        lost = self.discard
        return (
            f"discarded as {lost.reason} when batch {self.batch} was formed; started under version "
            f"{lost.started_version}; {lost.response_tokens} response tokens"
        ) + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A dispatch of a prompt that was still unfinished when batch `batch`, the newest batch, was formed."""

    batch: int

    def __str__(self) -> str:
        return f"in flight when batch {self.batch}, the newest batch, was formed"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A dispatch of a prompt whose responses were in batch `batch` when this batch was voided; the prompt is issued
    again.
    """

    batch: int

    def __str__(self) -> str:
        return f"in batch {self.batch}, which was quarantined; the prompt was issued again"


Fate = Consumed | AwaitingTraining | Discarded | InFlight | Quarantined


def list_fates(log: Log, prompt: int) -> dict[GroupKey, Fate]:
    """Return what happened to each attempt to answer a prompt, oldest attempt first, according to the log entries read
    so far.

    The function reads the log from entry 0 until the prompt's responses were trained on or filtered, or until the log's
    end.

    Raises:
        Corrupt: a log entry is missing or damaged.
    """
    found: dict[GroupKey, Fate] = {}
    committed: dict[int, GroupKey] = {}  # maps a batch's log entry to the prompt's dispatch in the batch
    newest = -1
    for stored in iterate_written(log, 0, log.state.n):
        match stored.entry.body:
            case BatchCommitted(number, groups=groups, discards=discards, unjudged=unjudged):
                newest = max(newest, number)
                gone = [lost for lost in discards if lost.key.prompt == prompt]
                found |= {lost.key: Discarded(number, lost, _find_reason(lost, unjudged)) for lost in gone}
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


def _find_reason(lost: Discard, unjudged: Sequence[UnjudgedResponse]) -> str:
    """Return why a response could not be judged, if its group was discarded as unjudged; "" if the log does not say
    why."""
    reasons = (one.why for one in unjudged if one.key == lost.key)
    return next(reasons, "") if lost.reason is DiscardReason.UNJUDGED else ""


def find_version(log: Log, version: int) -> WrittenEntry:
    """Find the log entry that published a policy version; an old version is found by bisection of the log.

    Raises:
        Missing: no log entry read so far publishes this policy version.
        Corrupt: a log entry that the search must read is missing or damaged.
    """
    state = log.state
    if not 0 <= version <= state.version:
        raise Missing(f"{log.store.uri} has no version {version}; its newest version is {state.version}")
    if version in state.held:  # always true for the newest policy version
        return get_entry(log, next(iter(state.held[version].values())))
    low, high = 0, state.published  # log entry `low` is before the version's publication, `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        if get_entry(log, middle).entry.version < version:
            low = middle
        else:
            high = middle
    return get_entry(log, high)
