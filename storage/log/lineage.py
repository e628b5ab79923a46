"""What became of each dispatch of a prompt, and which entry published a version: questions to a run's log.

A dispatch is in flight from its issue on, until it is discarded with a reason or committed in a batch; there it waits,
is consumed by a version, or is quarantined with the batch, if that is voided, and issued again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rollflow.storage.errors import Missing
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, VersionPublished, Written, entry_path
from rollflow.storage.log.log import Log
from rollflow.storage.log.reading import AT_ONCE
from rollflow.storage.records import Discard, DiscardReason, GroupKey


@dataclass(frozen=True, slots=True)
class Consumed:
    """Trained into `version`, as part of batch `version - 1`."""

    version: int

    def __str__(self) -> str:
        return f"trained into version {self.version}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Committed and not trained on yet."""

    batch: int

    def __str__(self) -> str:
        return f"committed in batch {self.batch}, waiting for the learner"


@dataclass(frozen=True, slots=True)
class Discarded:
    """Given up when batch `batch` was formed."""

    batch: int
    discard: Discard

    def __str__(self) -> str:
        lost = self.discard
        return (
            f"discarded when batch {self.batch} was formed: {lost.reason}, started under version "
            f"{lost.started_version}, {lost.response_tokens} response tokens"
        )


@dataclass(frozen=True, slots=True)
class InFlight:
    """Issued, and without a fate when batch `batch`, the newest, was formed."""

    batch: int

    def __str__(self) -> str:
        return f"in flight when batch {self.batch}, the newest, was formed"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """In a file of batch `batch` that was voided; issued again."""

    batch: int

    def __str__(self) -> str:
        return f"in batch {self.batch}, which was quarantined; issued again"


Fate = Consumed | Waiting | Discarded | InFlight | Quarantined


def fates(log: Log, prompt: int) -> dict[GroupKey, Fate]:
    """The dispatches of one prompt, first to last, as far as the log was read.

    It reads the log from its beginning to where the prompt's last fate is known.

    Raises:
        Corrupt: an entry is missing or damaged.
    """
    found: dict[GroupKey, Fate] = {}
    committed: dict[int, GroupKey] = {}  # entry of a batch -> the prompt's dispatch in it
    newest = -1
    for written in _read(log, log.state.n):
        match written.entry.body:
            case BatchCommitted(number, groups=groups, discards=discards):
                newest = number
                found |= {one.key: Discarded(number, one) for one in discards if one.key.prompt == prompt}
                for key in (group.key for group in groups if group.prompt == prompt):
                    found[key], committed[written.entry.n] = Waiting(number), key
                if any(one.key.prompt == prompt and one.reason is DiscardReason.FILTERED for one in discards):
                    return found
            case BatchVoided(number, entry) if entry in committed:
                found[committed[entry]] = Quarantined(number)
            case VersionPublished(number, batch_entry) if batch_entry in committed:
                return found | {committed[batch_entry]: Consumed(number)}
    if prompt in log.state.open:
        found[GroupKey(prompt, log.state.open[prompt])] = InFlight(newest)
    return found


def find_version(log: Log, version: int) -> Written:
    """The entry that published a version, in O(log n) reads, or one where the state knows it.

    Raises:
        Missing: there is no such version, as far as the log was read.
        Corrupt: an entry on the way is missing or damaged.
    """
    state = log.state
    if not 0 <= version <= state.version:
        raise Missing(f"{log.run.uri} has no version {version}, the newest is {state.version}")
    if version == state.version:
        return _there(log, state.published)
    if version in state.held:
        return _there(log, next(iter(state.held[version].values())))
    low, high = 0, state.published  # the version is newer than entry `low` says, and not than entry `high` says
    while high - low > 1:
        middle = (low + high) // 2
        if _there(log, middle).entry.version < version:
            low = middle
        else:
            high = middle
    return _there(log, high)


def _there(log: Log, n: int) -> Written:
    written = log.read(n)
    if written is None:
        raise Missing(f"{log.run.uri}/{entry_path(n)} is gone")
    return written


def _read(log: Log, last: int) -> Iterator[Written]:
    """The entries up to `last`, several reads at a time."""
    pool = ThreadPoolExecutor(AT_ONCE, "log")
    try:
        for first in range(0, last + 1, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, last + 1))
            yield from pool.map(lambda n: _there(log, n), numbers)
    finally:
        pool.shutdown(cancel_futures=True)
