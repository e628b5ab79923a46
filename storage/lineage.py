"""What became of each dispatch, from the batch commits alone: the fates that `inspect` shows.

A dispatch has one fate: consumed by a version, waiting in a committed batch, discarded with a reason, in flight (so
says the newest commit), or quarantined with its batch until that is settled. The audit proves that it is one; this
finds which.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from rollflow.storage.errors import Corrupt
from rollflow.storage.records import Cursor, Discard, GroupKey
from rollflow.storage.trajectories import BatchCommit, TrajectoryStore, committed_editions


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
    """Dispatched and not finished when batch `batch`, the newest, was formed."""

    batch: int

    def __str__(self) -> str:
        return f"in flight when batch {self.batch}, the newest, was formed"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """In an edition of batch `batch` that was voided, which the scheduler has still to settle."""

    batch: int

    def __str__(self) -> str:
        return f"in batch {self.batch}, which was quarantined; to be issued again"


Fate = Consumed | Waiting | Discarded | InFlight | Quarantined


@dataclass(frozen=True, slots=True)
class Lineage:
    """The commits that count, in the order of their batches, and the fate of every dispatch that any commit names."""

    commits: tuple[BatchCommit, ...]
    fates: dict[GroupKey, Fate]
    cursor: Cursor

    @classmethod
    def read(cls, batches: TrajectoryStore, latest: int) -> Lineage:
        """From storage; `latest` is the newest published version (-1: none)."""
        every = _readable(batches)
        counting = tuple(c for c in every if c.groups and c.edition == batches.edition(c.number))
        newest = max(every, key=lambda c: c.order, default=None)
        if newest is None:
            return cls((), {}, Cursor())
        fates: dict[GroupKey, Fate] = {}
        for commit in every:
            fates |= dict.fromkeys(commit.groups, Quarantined(commit.number))
        fates |= dict.fromkeys(newest.in_flight, InFlight(newest.number))
        for commit in every:
            fates |= {discard.key: Discarded(commit.number, discard) for discard in commit.discards}
        for commit in counting:
            done = Consumed(commit.number + 1) if commit.number < latest else Waiting(commit.number)
            fates |= dict.fromkeys(commit.groups, done)
        return cls(counting, fates, newest.cursor)

    def attempts(self, prompt: int) -> dict[GroupKey, Fate]:
        """The dispatches of one prompt, first to last."""
        return {key: self.fates[key] for key in sorted(self.fates) if key.prompt == prompt}


def _readable(batches: TrajectoryStore) -> list[BatchCommit]:
    found = []
    for name in committed_editions(batches.run):
        with contextlib.suppress(Corrupt):  # its batch is voided; the settlement says what became of its groups
            found.append(batches.record_of(*name))
    return found
