"""Shows the result of `rollflow rejudge` (which scores would change) as tables or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.rejudge import UNRECORDED, DomainVerdicts, Rejudged, RejudgeReport
from rollflow.tasks.scorers.base import Score

LONGEST_TEXT = 2000  # Largest number of characters of a response that are printed as JSON.


def build_value(context: RunContext, config: RunConfig, report: RejudgeReport) -> dict[str, Any]:
    """Return the report of rescored responses as JSON values."""
    total = report.total
    return {
        "run": report.run,
        "versions": report.versions,
        "same": report.is_same,
        **_build_counts(total),
        "domains": {domain: _build_counts(one) for domain, one in sorted(report.domains.items())},
        "outcomes": [
            {"before": before, "now": now, "responses": count}
            for (before, now), count in sorted(report.outcomes.items())
        ],
        "changes": [_build_change(context, config, one) for one in report.changes],
        "unjudged_responses": [_build_change(context, config, one) for one in report.unjudged],
        "damaged": [{"version": version, "why": why} for version, why in report.damaged.items()],
    }


def _build_counts(counts: DomainVerdicts) -> dict[str, Any]:
    return {
        "responses": counts.responses,
        "changed": counts.changed,
        "flips": counts.flips,
        "unjudged": counts.unjudged,
        "reward_before": counts.reward_before / counts.judged if counts.judged else None,
        "reward_now": counts.reward_now / counts.judged if counts.judged else None,
        "scorers_before": dict(counts.scorers_before),
        "scorers_now": dict(counts.scorers_now),
    }


def _build_change(context: RunContext, config: RunConfig, one: Rejudged) -> dict[str, Any]:
    before, now = one.stored.trajectory, one.score
    return {
        "trajectory": one.stored.name,
        "version": one.stored.version,
        "domain": one.stored.domain,
        "flip": one.is_flip,
        "response": decode_response(context, config, one)[:LONGEST_TEXT],
        "before": {
            "reward": before.reward,
            "outcome": one.stored.outcome,
            "reason": before.reason,
            "parts": dict(before.reward_parts or {}),
            "scorer_version": before.scorer_version,
        },
        "now": {
            "reward": now.value,
            "outcome": now.outcome.value,
            "reason": now.reason,
            "parts": dict(now.parts),
            "scorer_version": now.version or None,
        },
    }


def decode_response(context: RunContext, config: RunConfig, one: Rejudged) -> str:
    """Return the text of a response, in the form that its scorer reads."""
    special = config.scorers[one.stored.request.scorer].special_tokens
    return context.tokenizer.decode_response(list(one.stored.request.tokens), special)


def print_report(context: RunContext, config: RunConfig, report: RejudgeReport, console: Console | None = None) -> None:
    """Print the report of rescored responses: counts, a table of outcomes, a table of prompt domains, and the first
    changed scores.
    """
    console = console or Console(highlight=False)
    total = report.total
    first, last = report.versions[0], report.versions[-1]
    named = f"version {first}" if first == last else f"versions {first} to {last}"
    console.print(f"run {report.run}, {named}: {total.responses:,} responses judged again", soft_wrap=True)
    for line in _list_scorers(total):
        console.print(line, soft_wrap=True, markup=False)
    if report.outcomes:
        console.print(_build_outcome_table(report))
        console.print(_build_domain_table(report))
    for one in report.changes:
        _print_change(context, config, one, console)
    if hidden := total.changed - len(report.changes):
        console.print(f"and {hidden:,} more changes; --show N shows more", soft_wrap=True)
    for one in report.unjudged[:1]:
        console.print(f"{one.stored.name} was not judged: {one.score.reason}", soft_wrap=True, markup=False)
    for version, why in report.damaged.items():
        console.print(f"the batch of version {version} was not judged: {why}", soft_wrap=True, markup=False)
    console.print(conclude(report), soft_wrap=True)


def conclude(report: RejudgeReport) -> str:
    """Return one sentence that summarizes how many scores have changed."""
    total = report.total
    parts = [f"{total.changed:,} of {total.judged:,} verdicts changed" if total.changed else ""]
    parts += [f"{total.flips:,} of them by the same version of the scorer, which is not deterministic"] * bool(
        total.flips
    )
    parts += [f"{total.unjudged:,} responses could not be judged"] * bool(total.unjudged)
    parts += [f"{len(report.damaged)} batches could not be read"] * bool(report.damaged)
    said = "; ".join(filter(None, parts))
    return said or f"nothing changed: all {total.judged:,} verdicts are the same"


def _list_scorers(total: DomainVerdicts) -> Iterator[str]:
    yield f"scorer versions in the run: {_describe_versions(total.scorers_before)}"
    yield f"scorer versions now: {_describe_versions(total.scorers_now)}"


def _describe_versions(found: Counter[str]) -> str:
    names = [f"{version} ({count:,} responses)" for version, count in sorted(found.items()) if version != UNRECORDED]
    unknown = f"{UNRECORDED} ({found[UNRECORDED]:,} responses)" if found[UNRECORDED] else ""
    return ", ".join(filter(None, [*names, unknown])) or "none"


def _build_outcome_table(report: RejudgeReport) -> Table:
    table = Table(title="outcomes", title_justify="left")
    for name in ("in the run", "now"):
        table.add_column(name)
    table.add_column("responses", justify="right")
    for (before, now), count in sorted(report.outcomes.items()):
        style = "" if before in (now, UNRECORDED) else "bold yellow"
        table.add_row(before, now, f"{count:,}", style=style)
    return table


def _build_domain_table(report: RejudgeReport) -> Table:
    table = Table(title="mean rewards", title_justify="left")
    table.add_column("domain")
    for name in ("responses", "in the run", "now", "changed", "not judged"):
        table.add_column(name, justify="right")
    for domain, one in sorted(report.domains.items()):
        means = [f"{total / one.judged:.4f}" if one.judged else "" for total in (one.reward_before, one.reward_now)]
        table.add_row(Text(domain), f"{one.responses:,}", *means, f"{one.changed:,}", f"{one.unjudged:,}")
    return table


def _print_change(context: RunContext, config: RunConfig, one: Rejudged, console: Console) -> None:
    before, version = one.stored.trajectory, one.stored.version
    stored = Score(before.reward, before.reason, before.outcome or one.score.outcome)
    console.print(Text(f"{one.stored.name} of {one.stored.domain}, version {version}", style="bold"), soft_wrap=True)
    response = Text(decode_response(context, config, one).strip(), overflow="ellipsis", no_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("  response", response)
    table.add_row("  in the run", Text(_describe_score(stored, one.stored.outcome)))
    table.add_row("  now", Text(_describe_score(one.score, one.score.outcome.value)))
    console.print(table)


def _describe_score(score: Score, outcome: str) -> str:
    return f"{score.value:g}, {outcome}" + (f": {score.reason}" if score.reason else "")
