"""Merges the reports of helpers into the records of the reward actor, and sums their counters.

- For each test case, the longest run time of a correct program in any helper is stored.
- Counts are sums over all helpers since the start of the run, including helpers that have ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.storage.run_records.sandbox_figures import SandboxUse
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.runtime.actor_warnings import ActorWarning


@dataclass(frozen=True, slots=True)
class HelperReport:
    """A report of a helper about its work since its start. `anchors` has, by scorer, new program times and counts of
    programs that were killed early. `counts` has the counts of each scorer that judges responses twice. `sandboxes` has
    the usage numbers of the helper's sandboxes.

    `worker_seconds` is the number of worker processes times the seconds since the start.
    """

    busy_seconds: float = 0.0
    worker_seconds: float = 0.0
    costs: Sequence[CpuCost] = ()
    warned: Sequence[ActorWarning] = ()
    anchors: Mapping[str, CaseAnchors] = field(default_factory=dict)
    counts: Mapping[str, SecondVerdictCounts] = field(default_factory=dict)
    sandboxes: Sequence[SandboxUse] = ()


class HelperReports:
    """The last report of each helper, and the records into which reports are merged."""

    def __init__(self, anchors: Mapping[str, CaseAnchors], counts: Mapping[str, SecondVerdictCounts]) -> None:
        """Begin without reports; `anchors` and `counts` are the reward actor's records, by scorer."""
        self._anchors, self._counts = anchors, counts
        self._reports = dict[Hashable, HelperReport]()
        self._ended = HelperReport()  # sums over the helpers that have ended

    def note(self, helper: Hashable, report: HelperReport) -> None:
        """Store a helper's report, and add its program times and counts to the reward actor's records."""
        before = self._reports.get(helper, HelperReport())
        for scorer, counts in report.counts.items():
            self._counts[scorer].merge_news(counts, before.counts.get(scorer, SecondVerdictCounts()))
        for name, new in report.anchors.items():
            record, old = self._anchors[name], before.anchors.get(name, CaseAnchors())
            record.merge_rows(new.rows)
            record.kills += new.kills - old.kills
            record.rechecked += new.rechecked - old.rechecked
            record.false_kills += new.false_kills - old.false_kills
        self._reports[helper] = report

    def end(self, helper: Hashable) -> None:
        """Add the times of an ended helper to the sums."""
        report = self._reports.pop(helper, HelperReport())
        busy = self._ended.busy_seconds + report.busy_seconds
        self._ended = HelperReport(busy, self._ended.worker_seconds + report.worker_seconds)

    def sum(self) -> HelperReport:
        """Return the times summed over all helpers, ended ones included, and the costs, warnings and sandboxes of the
        running helpers only.
        """
        running = list(self._reports.values())
        return HelperReport(
            sum((report.busy_seconds for report in running), self._ended.busy_seconds),
            sum((report.worker_seconds for report in running), self._ended.worker_seconds),
            [cost for report in running for cost in report.costs],
            [warning for report in running for warning in report.warned],
            sandboxes=[use for report in running for use in report.sandboxes],
        )
