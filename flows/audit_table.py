"""The audit's report as tables for a person."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from rollflow.storage.audit import AuditReport

ROWS = 12  # version rows; a longer run is shown in this many spans


def print_report(report: AuditReport, console: Console | None = None) -> None:
    """Trajectories, staleness by version, prompt fates, violations."""
    console = console or Console(highlight=False)
    console.print(
        f"run {report.run}: {report.versions} versions, {report.trajectories} trajectories trained on, "
        f"{report.objects} objects checked, async_ratio {report.async_ratio:g}"
    )
    console.print(staleness_table(report))
    console.print(fates_table(report))
    if report.clean:
        console.print("[green]clean[/]: no invariant is broken")
        return
    console.print(f"[red]{len(report.violations)} violations[/]")
    for violation in report.violations:
        console.print(f"  [red]{violation.kind}[/] {violation.where}: {violation.what}")


def staleness_table(report: AuditReport) -> Table:
    """Trajectories by staleness (columns) and by version (rows, a span of versions each)."""
    ages = sorted(report.staleness)
    table = Table(title="trajectories by staleness", title_justify="left")
    table.add_column("versions")
    for age in ages:
        table.add_column(str(age), justify="right")
    versions = sorted(report.staleness_by_version)
    span = max(1, -(-len(versions) // ROWS))
    for start in range(0, len(versions), span):
        part = versions[start : start + span]
        counts: Counter[int] = sum((report.staleness_by_version[v] for v in part), Counter())
        name = str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        table.add_row(name, *(str(counts[age]) for age in ages))
    table.add_section()
    table.add_row("all", *(str(report.staleness[age]) for age in ages))
    return table


def fates_table(report: AuditReport) -> Table:
    """Dispatched groups by fate."""
    table = Table(title="prompt fates", title_justify="left")
    table.add_column("fate")
    table.add_column("groups", justify="right")
    for fate, count in report.fates.most_common():
        table.add_row(fate, str(count))
    return table
