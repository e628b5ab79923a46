"""Defines the report of an audit, which contains counts and the violations that the audit found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollflow.storage.log.state import RunState

ViolationKind = Literal["stale", "duplicate", "missing", "gap", "altered", "lineage", "unjudged"]
# largest number of version ranges with separate counts, so that a report does not grow with the run
SPANS = 64


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of a run's invariants: its kind, the path of the faulty object, and a description."""

    kind: ViolationKind
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The numbers of trajectories and groups in one batch file."""

    staleness: Counter[int]  # number of trajectories by staleness
    domains: Counter[str]  # number of groups by domain
    # number of trajectories that were scored, by domain and version of the scorer
    scorers: dict[str, Counter[str]] = field(default_factory=dict)
    left_out: int = 0  # number of episodes that nobody could judge and that the learner leaves out


@dataclass(slots=True)
class ScorerSpan:
    """Trajectories that one version of a scorer scored: their number, and the first and last policy version trained on
    them.
    """

    trajectories: int
    first: int
    last: int


@dataclass(slots=True)
class AuditReport:
    """The report of an audit. All fields of the report but `since` and `bytes` cover the whole run, even if the audit
    read only the newest log entries.
    """

    run: str = ""
    async_ratio: float = 0.0
    since: int = 0  # the first log entry that this audit read
    entries: int = 0
    versions: int = 0
    trajectories: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # number of trajectories by staleness, in policy versions
    # number of trajectories by the first policy version of a range of versions, and by staleness
    staleness_by_version: dict[int, Counter[int]] = field(default_factory=dict)
    span: int = 1  # the number of policy versions per range
    domains: Counter[str] = field(default_factory=Counter)  # number of groups trained on, by domain of the prompt
    # scored trajectories, by domain and version of the scorer; trajectories of older runs have no scorer version
    scorers: dict[str, dict[str, ScorerSpan]] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)  # number of prompt dispatches by how they ended
    discarded_tokens: int = 0
    surplus_tokens: int = 0  # tokens in surplus (unused) responses of the groups that were trained on
    trained_tokens: int = 0
    left_out: int = 0  # number of episodes that nobody could judge and that were left out of their trained groups
    objects: int = 0  # the number of stored objects that were read and hashed
    bytes: int = 0  # the total size in bytes of the objects that this audit read
    quarantined: list[str] = field(default_factory=list)  # voided batches, with the reasons
    overdue: list[str] = field(default_factory=list)  # prompts that are in flight for too long
    unchecked: str = ""  # why batches were not compared with prompts (or with limits)
    violations: list[Violation] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """True if the audit found no violation."""
        return not self.violations

    def add(self, kind: ViolationKind, where: str, what: str) -> None:
        """Add a violation to the report."""
        self.violations.append(Violation(kind, where, what))

    def count_trained(self, version: int, rows: RowCounts) -> None:
        """Add the rows of the batch that policy version `version` was trained on to the report's counts."""
        self.trajectories += rows.staleness.total()
        self.left_out += rows.left_out
        self.staleness.update(rows.staleness)
        self.domains.update(rows.domains)
        for domain, scored in rows.scorers.items():
            for scorer, count in scored.items():
                span = self.scorers.setdefault(domain, {}).setdefault(scorer, ScorerSpan(0, version, version))
                span.trajectories += count
                span.first, span.last = min(span.first, version), max(span.last, version)
        self.staleness_by_version.setdefault(self._first(version), Counter()).update(rows.staleness)
        while len(self.staleness_by_version) > SPANS:
            self.span *= 2
            apart, self.staleness_by_version = self.staleness_by_version, {}
            for first, counts in apart.items():
                self.staleness_by_version.setdefault(self._first(first), Counter()).update(counts)

    def close(self, state: RunState) -> None:
        """Copy the counts in the run's state into the report."""
        totals = state.totals
        discarded = {fate: count for fate, count in totals.groups.items() if fate != "trained"}
        self.run, self.async_ratio = state.run_id, state.alpha
        self.entries, self.versions = state.n + 1, max(state.version, 0)
        self.trained_tokens, self.surplus_tokens = totals.tokens["trained"], totals.surplus_tokens
        self.discarded_tokens = totals.tokens.total() - self.trained_tokens
        self.fates = _some({"trained": totals.groups["trained"], **_label_discards(discarded)})
        self.fates += _some({"committed, waiting": sum(len(batch.groups) for batch in state.waiting.values())})
        self.fates += _some({"in flight": len(state.open)})

    def _first(self, version: int) -> int:
        """Return the first policy version of the range that contains `version`; the first range begins with version
        1."""
        return version - (version - 1) % self.span


def _label_discards(discarded: Mapping[str, int]) -> dict[str, int]:
    return {f"discarded: {reason}": count for reason, count in discarded.items()}


def _some(counts: Mapping[str, int]) -> Counter[str]:
    return +Counter(counts)
