"""The state of a run: what its log says, up to some entry. `rules` says how an entry changes it.

The size of the state does not grow with the number of versions.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollflow.storage.errors import Conflict, Stale
from rollflow.storage.log.entries import Group, Role
from rollflow.storage.log.retention import Kind, Retention
from rollflow.storage.records import Cursor, GroupKey, StoredObject

FOLD = 3  # raised with any change of the rules or the state: older snapshots are not read
NOBODY = -1  # stands for the claim's entry


class Refused(Conflict):
    """An entry that cannot follow: nothing was changed, and it is not appended."""


class Deposed(Refused):
    """The role has another claim now: this writer stops."""


class Superseded(Deposed):
    """A role cannot be claimed any more: its supervisor is not the newest."""


class TooOld(Refused, Stale):
    """A group that is older than the asynchronous ratio allows."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who has a role."""

    entry: int
    under: int | None
    who: str
    cluster: str
    host: str
    process: int


class ConfigPlace(NamedTuple):
    """The entry that has a config, and the first version that is trained under it."""

    entry: int
    version: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch that no version was trained on yet."""

    entry: int
    file: StoredObject
    rows: int
    groups: tuple[Group, ...]
    surplus_tokens: int
    behind: Mapping[int, int]  # prompt -> how often it was left behind before


@dataclass(slots=True)
class Totals:
    """Counts over the whole run. Staleness is that of a group's oldest sample."""

    groups: Counter[str] = field(default_factory=Counter)  # fate -> dispatches
    tokens: Counter[str] = field(default_factory=Counter)  # fate -> response tokens
    staleness: Counter[int] = field(default_factory=Counter)  # of the groups that were trained on
    surplus_tokens: int = 0  # of batches that were trained on
    rows: int = 0  # trajectories that were trained on

    def copy(self) -> Totals:
        """Another one to change."""
        counters = Counter(self.groups), Counter(self.tokens), Counter(self.staleness)
        return Totals(*counters, self.surplus_tokens, self.rows)

    def count(self, fate: str, tokens: int) -> None:
        """One more dispatch has its fate."""
        self.groups[fate] += 1
        self.tokens[fate] += tokens


@dataclass(slots=True)
class RunState:
    """What the log says, up to entry `n`."""

    n: int = -1
    sha256: str = ""  # of entry n
    run_id: str = ""
    configs: tuple[ConfigPlace, ...] = ()  # all configs of the run in order; the last one is in force
    fixed: str = ""  # hash of the part of the config that never changes
    formed: dict[str, Any] = field(default_factory=dict)  # the keys by which batches are formed -> their values
    alpha: float = 0.0
    group_size: int = 1
    retention: Retention = field(default_factory=Retention)
    claims: dict[str, Claim] = field(default_factory=dict)  # role -> its newest claim
    version: int = -1  # the newest policy version
    published: int = -1  # its entry
    next_batch: int = 0
    issued: list[int] = field(default_factory=list)  # source -> its first position that was never dispatched
    filtered: list[int] = field(default_factory=list)  # source -> its groups that went for good
    open: dict[int, int] = field(default_factory=dict)  # prompt -> attempt, in the order of issue
    behind: dict[int, int] = field(default_factory=dict)  # open prompt -> how often it was left behind
    waiting: dict[int, Waiting] = field(default_factory=dict)  # batch number -> the batch
    holes: list[int] = field(default_factory=list)  # batches to form again, in order
    voids: int = 0
    not_finite: int = 0  # batches voided as such since the newest version
    redraws: dict[int, int] = field(default_factory=dict)  # prompt that is not trained on -> such batches it was in
    held: dict[int, dict[Kind, int]] = field(default_factory=dict)  # version -> kind -> entry, while it may be pruned
    totals: Totals = field(default_factory=Totals)

    def config_of(self, version: int) -> int:
        """Return the entry of the config that `version` was trained under; for a version to come, the one in force."""
        return next(place.entry for place in reversed(self.configs) if place.version <= max(version, 0))

    def config_at(self, n: int) -> int:
        """Return the entry of the config that was in force when entry `n` was appended."""
        return next(place.entry for place in reversed(self.configs) if place.entry <= n)

    @property
    def cursor(self) -> Cursor:
        """How far each source was issued."""
        return Cursor(tuple(self.issued), tuple(self.filtered))

    @property
    def in_flight(self) -> tuple[GroupKey, ...]:
        """The open dispatches, in the order of issue."""
        return tuple(GroupKey(prompt, attempt) for prompt, attempt in self.open.items())

    @property
    def releasable(self) -> list[tuple[int, Kind]]:
        """What may be pruned, and was not."""
        return [
            (version, kind)
            for version, kinds in self.held.items()
            for kind in kinds
            if not self.retention.needed(kind, version, self.version)
        ]

    def newest_claim(self, role: Role) -> int:
        """The entry by which `role` is claimed; `NOBODY` if it never was."""
        return self.claims[role].entry if role in self.claims else NOBODY

    def copy(self) -> RunState:
        """Another one to change."""
        other = copy.copy(self)
        for name in ("claims", "formed", "open", "behind", "waiting", "redraws"):
            setattr(other, name, dict(getattr(self, name)))
        for name in ("issued", "filtered", "holes"):
            setattr(other, name, list(getattr(self, name)))
        other.held = {version: dict(kinds) for version, kinds in self.held.items()}
        other.totals = self.totals.copy()
        return other
