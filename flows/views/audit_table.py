"""Shows the audit of a run to users: a progress line during the audit, and then tables with the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollflow.storage.audit.audit import AuditProgress, audit
from rollflow.storage.audit.expected import NOTHING, Expected
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.objects import ObjectStore
from rollflow.tasks.rollout.evaluation import DomainResult

ROWS = 12  # Largest number of rows in the table of staleness. In a long run, a row covers several policy versions.


def show_audit(
    store: ObjectStore, *, deep: bool, console: Console | None = None, expected: Expected = NOTHING
) -> AuditReport:
    """Audit a run's storage, and show a progress line meanwhile if the output is a terminal. See `audit` for the
    errors.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        return audit(store, deep=deep, expected=expected)
    with console.status("audit: reading the log") as line:
        progress = lambda far: line.update(f"audit: {_progress(far)}")  # noqa: E731
        return audit(store, deep=deep, progress=progress, expected=expected)


def _progress(far: AuditProgress) -> str:
    return (
        f"{far.entries:,} of {far.of_entries:,} entries of the log, {far.objects:,} of "
        f"{far.of_objects:,} objects, {far.bytes:,} bytes"
    )


def print_report(report: AuditReport, shares: Mapping[str, float], console: Console | None = None) -> None:
    """Print the report of an audit: counts, the violations, and tables of staleness, of outcomes of response groups,
    and of prompt domains.
    """
    console = console or Console(highlight=False)
    console.print(
        f"run {report.run}: {report.versions} versions, {report.trajectories} trained trajectories, "
        f"{report.entries} entries, {report.objects} checked objects, async_ratio {report.async_ratio:g}"
    )
    console.print(read_line(report))
    console.print(staleness_table(report))
    console.print(fates_table(report))
    console.print(tokens_line(report))
    if report.left_out:
        console.print(f"{report.left_out:,} unjudged responses are stored and left out of their groups")
    if len(shares) > 1:
        console.print(domains_table(report.domains, shares))
    for line in scorer_lines(report):
        console.print(line, soft_wrap=True, markup=False)
    for voided in report.quarantined:
        console.print(f"quarantined {escape(voided)}", soft_wrap=True)
    for prompt in report.overdue:
        console.print(f"open for long: {escape(prompt)}", soft_wrap=True)
    if report.unchecked:
        console.print(f"[yellow]{escape(report.unchecked)}[/]", soft_wrap=True)
    if report.clean:
        console.print("[green]clean[/]: no invariant is broken")
        return
    console.print(f"[red]{len(report.violations)} violations[/]")
    for violation in report.violations:
        console.print(f"  [red]{violation.kind}[/] {escape(f'{violation.where}: {violation.what}')}")


def read_line(report: AuditReport) -> str:
    """Return a sentence that says how much of the run's storage this audit read. Parts of the storage that an earlier
    audit had read are skipped.
    """
    read = f"read {report.entries - report.since:,} entries and {report.bytes:,} bytes of objects"
    return (
        f"{read}, from entry {report.since} on, because an earlier audit found nothing wrong before it"
        if report.since
        else read
    )


def tokens_line(report: AuditReport) -> str:
    """Return a line of text with the numbers of trained and discarded tokens, and the mean lengths of trained and
    discarded groups of responses.

    The mean lengths are shown because discarding long groups of responses biases training towards short answers.
    """
    line = f"tokens: {report.trained_tokens:,} trained on"
    gone = sum(count for fate, count in report.fates.items() if fate.startswith("discarded"))
    if report.surplus_tokens:
        line += f", {report.surplus_tokens:,} of surplus responses"
    if gone and report.fates["trained"]:
        trained, lost = report.trained_tokens / report.fates["trained"], report.discarded_tokens / gone
        line += f", {report.discarded_tokens:,} discarded ({lost:,.0f} a group, a trained one has {trained:,.0f})"
    return line


def scorer_lines(report: AuditReport) -> list[str]:
    """Return a line of text for each prompt domain that says which versions of the domain's scorer gave the rewards.

    Several versions appear, for example, if the run was resumed after the scorer's code had changed.
    """
    return [
        f"scorer of {domain}: "
        + ", ".join(
            f"{version} (versions {span.first} to {span.last}, {span.trajectories:,} trajectories)"
            for version, span in sorted(spans.items(), key=lambda item: (item[1].first, item[1].last))
        )
        for domain, spans in sorted(report.scorers.items())
    ]


def staleness_table(report: AuditReport) -> Table:
    """Build a table that counts trajectories by staleness (columns) and by range of policy versions (rows)."""
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
        last = min(part[-1] + report.span - 1, report.versions)
        name = str(last) if last == part[0] else f"{part[0]}-{last}"
        table.add_row(name, *(str(counts[age]) for age in ages))
    table.add_section()
    table.add_row("all", *(str(report.staleness[age]) for age in ages))
    return table


def fates_table(report: AuditReport) -> Table:
    """Build a table that counts groups of responses by outcome, such as "trained" or "discarded"."""
    table = Table(title="prompt fates", title_justify="left")
    table.add_column("fate")
    table.add_column("groups", justify="right")
    for fate, count in report.fates.most_common():
        table.add_row(fate, str(count))
    return table


def domains_table(
    trained: Mapping[str, int], shares: Mapping[str, float], held_out: Mapping[str, DomainResult] | None = None
) -> Table:
    """Build a table that counts the trained groups of responses by prompt domain, with the actual and the configured
    share of each domain. If `held_out` is given, the table has each domain's accuracy and reward in this evaluation.
    """
    table = Table(title="trained groups by domain", title_justify="left")
    table.add_column("domain")
    for name in ("groups", "share", "asked for", *(("held-out accuracy", "reward") if held_out else ())):
        table.add_column(name, justify="right")
    total = max(sum(trained.values()), 1)
    for domain, share in shares.items():
        count = trained.get(domain, 0)
        cells = [str(count), f"{count / total:.1%}", f"{share:.1%}"]
        if held_out:
            found = held_out.get(domain)
            cells += [f"{found.accuracy:.3f}", f"{found.reward:.3f}"] if found else ["", ""]
        table.add_row(domain, *cells)
    return table


def build_kind_table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """Build a transposed table: each item of `rows` becomes a column, with the item's value "kind" as its heading."""
    table = Table(title, *(str(row["kind"]) for row in rows))
    for name in [name for name in rows[0] if name != "kind"]:
        table.add_row(name, *(str(row.get(name, "")) for row in rows))
    return table
