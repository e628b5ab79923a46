"""Defines the state of a run after any given entry of the run's log. The module `rules` describes how a log entry
changes the state of a run.

The size of a run's state does not grow with the number of policy versions.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollflow.storage.errors import Conflict, Stale
from rollflow.storage.log.entries import Role, TrainedGroup
from rollflow.storage.log.retention import Kind, Retention
from rollflow.storage.records import Cursor, GroupKey, StoredObject

FOLD = 4  # version number of the log's rules and of `RunState`; snapshots with another number are not read
NOBODY = -1  # used as the number of the log entry that claimed a role if no process has claimed the role


class EntryRefused(Conflict):
    """The log's rules do not allow a log entry, so the entry is not appended and the run's state is unchanged."""


class Deposed(EntryRefused):
    """Another process has claimed the role of this process, so this process must stop."""


class Superseded(Deposed):
    """A process cannot claim a role, because another supervisor has replaced the process's own supervisor."""


class GroupTooOld(EntryRefused, Stale):
    """A group of trajectories is older than `async_ratio` allows."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The process that has claimed a role."""

    entry: int
    under: int | None
    who: str
    cluster: str
    host: str
    process: int


class ConfigPlace(NamedTuple):
    """The log entry that recorded a config, and the first policy version that is trained under this config."""

    entry: int
    version: int


class EpochPlace(NamedTuple):
    """The newest epoch of a prompt source that skips solved questions, as recorded in a log entry."""

    entry: int = NOBODY
    number: int = -1
    end: int = 0  # the position in the prompt source after the epoch's last prompt
    asked: int = 0
    skipped: int = 0  # number of skipped questions


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """A committed batch that no policy version was trained on yet."""

    entry: int
    file: StoredObject
    rows: int
    groups: tuple[TrainedGroup, ...]
    surplus_tokens: int
    behind: Mapping[int, int]  # for each prompt: how often earlier responses were discarded as stale or redundant


@dataclass(slots=True)
class RunTotals:
    """Counts over the whole run. The staleness of a group of trajectories is the staleness of the group's oldest
    trajectory."""

    groups: Counter[str] = field(default_factory=Counter)  # number of groups (attempts at a prompt), by how they ended
    # response tokens of groups (attempts at a prompt), by how the groups ended
    tokens: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)  # groups trained on, by staleness in policy versions
    surplus_tokens: int = 0  # tokens in surplus (unused) responses of the groups that were trained on
    rows: int = 0  # number of trajectories that policy versions were trained on

    def copy(self) -> RunTotals:
        """Return a copy of these counts. The caller may change the copy."""
        counters = Counter(self.groups), Counter(self.tokens), Counter(self.staleness)
        return RunTotals(*counters, self.surplus_tokens, self.rows)

    def count(self, fate: str, tokens: int) -> None:
        """Count one more dispatch (attempt to answer a prompt) that ended as `fate` says, and count its response
        tokens.
        """
        self.groups[fate] += 1
        self.tokens[fate] += tokens


@dataclass(slots=True)
class RunState:
    """The state of a run after log entry `n`."""

    n: int = -1
    sha256: str = ""  # the hash of log entry n
    run_id: str = ""
    configs: tuple[ConfigPlace, ...] = ()  # all configs of the run in order; the last config is the current one
    fixed: str = ""  # hash of the config keys that never change during a run
    formed: dict[str, Any] = field(default_factory=dict)  # values of the config keys in `rules.FORMED`
    alpha: float = 0.0
    group_size: int = 1
    retention: Retention = field(default_factory=Retention)
    # maps a role to the process that took the role last
    claims: dict[str, Claim] = field(default_factory=dict)
    version: int = -1  # the newest policy version
    published: int = -1  # the log entry that published the newest policy version
    next_batch: int = 0
    issued: list[int] = field(default_factory=list)  # per prompt source: the number of prompts that were issued
    # per prompt source: the number of prompts that the run's filter removed
    filtered: list[int] = field(default_factory=list)
    # newest epoch of each source that skips solved questions
    epochs: dict[int, EpochPlace] = field(default_factory=dict)
    # maps each prompt in flight to its attempt number, in the order in which the prompts were issued
    open: dict[int, int] = field(default_factory=dict)
    # maps a prompt in flight to how often earlier responses to the prompt were discarded as stale or redundant
    behind: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, CommittedBatch] = field(default_factory=dict)  # maps a batch number to the batch
    holes: list[int] = field(default_factory=list)  # numbers of voided batches that must be formed again, in order
    voids: int = 0
    # number of batches since the newest policy version that were voided because of a NaN or an infinity
    not_finite: int = 0
    # maps a prompt that was not trained on yet to how many of its batches were voided because of a NaN or an infinity
    redraws: dict[int, int] = field(default_factory=dict)
    # maps a policy version, and each kind of its objects that will be pruned, to the entry that published the version
    held: dict[int, dict[Kind, int]] = field(default_factory=dict)
    totals: RunTotals = field(default_factory=RunTotals)

    def config_of(self, version: int) -> int:
        """Return the number of the log entry with the config under which policy version `version` was or will be
        trained."""
        return next(place.entry for place in reversed(self.configs) if place.version <= max(version, 0))

    def config_at(self, n: int) -> int:
        """Return the number of the log entry with the config that was current when log entry `n` was appended."""
        return next(place.entry for place in reversed(self.configs) if place.entry <= n)

    @property
    def cursor(self) -> Cursor:
        """The progress of each prompt source: how many prompts were issued and filtered."""
        return Cursor(tuple(self.issued), tuple(self.filtered))

    @property
    def in_flight(self) -> tuple[GroupKey, ...]:
        """The dispatches of prompts that are in flight, in the order in which the prompts were issued."""
        return tuple(GroupKey(prompt, attempt) for prompt, attempt in self.open.items())

    @property
    def releasable(self) -> list[tuple[int, Kind]]:
        """The stored objects that may be pruned and were not pruned yet, as pairs of policy version and kind."""
        return [
            (version, kind)
            for version, kinds in self.held.items()
            for kind in kinds
            if not self.retention.is_needed(kind, version, self.version)
        ]

    def newest_claim(self, role: Role) -> int:
        """Return the number of the log entry by which a process last claimed `role`; return `NOBODY` if no process has
        claimed the role."""
        return self.claims[role].entry if role in self.claims else NOBODY

    def copy(self) -> RunState:
        """Return a copy of the run's state that can be changed."""
        other = copy.copy(self)
        for name in ("claims", "formed", "epochs", "open", "behind", "waiting", "redraws"):
            setattr(other, name, dict(getattr(self, name)))
        for name in ("issued", "filtered", "holes"):
            setattr(other, name, list(getattr(self, name)))
        other.held = {version: dict(kinds) for version, kinds in self.held.items()}
        other.totals = self.totals.copy()
        return other
