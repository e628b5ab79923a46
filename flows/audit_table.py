"""The audit's report as tables for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from rollflow.storage.audit import AuditReport

ROWS = 12  # version rows; a longer run is shown in this many spans


def print_report(report: AuditReport, shares: Mapping[str, float], console: Console | None = None) -> None:
    """Trajectories, staleness by version, prompt fates, domains with their configured `shares`, violations."""
    console = console or Console(highlight=False)
    console.print(
        f"run {report.run}: {report.versions} versions, {report.trajectories} trajectories trained on, "
        f"{report.objects} objects checked, async_ratio {report.async_ratio:g}"
    )
    console.print(staleness_table(report))
    console.print(fates_table(report))
    console.print(tokens_line(report))
    if len(shares) > 1:
        console.print(domains_table(report.domains, shares))
    if report.clean:
        console.print("[green]clean[/]: no invariant is broken")
        return
    console.print(f"[red]{len(report.violations)} violations[/]")
    for violation in report.violations:
        console.print(f"  [red]{violation.kind}[/] {violation.where}: {violation.what}")


def tokens_line(report: AuditReport) -> str:
    """What was sampled and not trained on, and whether it was longer: dropping biases towards short answers."""
    line = f"tokens: {report.trained_tokens:,} trained on"
    gone = sum(count for fate, count in report.fates.items() if fate.startswith("discarded"))
    if report.surplus_tokens:
        line += f", {report.surplus_tokens:,} of surplus responses"
    if gone and report.fates["trained"]:
        trained, lost = report.trained_tokens / report.fates["trained"], report.discarded_tokens / gone
        line += f", {report.discarded_tokens:,} discarded ({lost:,.0f} a group, a trained one has {trained:,.0f})"
    return line


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


def domains_table(trained: Mapping[str, int], shares: Mapping[str, float]) -> Table:
    """Trained groups by domain, beside the share that was asked for."""
    table = Table(title="trained groups by domain", title_justify="left")
    table.add_column("domain")
    for name in ("groups", "share", "asked for"):
        table.add_column(name, justify="right")
    total = max(sum(trained.values()), 1)
    for domain, share in shares.items():
        count = trained.get(domain, 0)
        table.add_row(domain, str(count), f"{count / total:.1%}", f"{share:.1%}")
    return table
