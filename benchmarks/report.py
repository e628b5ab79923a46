"""Provides what all benchmarks share: result rows, the printed table, and the option `--json FILE`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value. `target` and `holds` are None if the value has no target."""

    case: str
    metric: str
    value: float
    target: float | None = None
    holds: bool | None = None


def at_least(case: str, metric: str, value: float, target: float) -> Row:
    """Create the row of a value that should not be below its target."""
    return Row(case, metric, value, target, value >= target)


def at_most(case: str, metric: str, value: float, target: float) -> Row:
    """Create the row of a value that should not exceed its target."""
    return Row(case, metric, value, target, value <= target)


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the option of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    return parser


def publish(rows: Sequence[Row], title: str, file: Path | None) -> None:
    """Print the table and write the JSON. A missed target is shown in its row, and is not an error."""
    table = Table(title=title, title_justify="left")
    for name in ("case", "metric", "value", "target", "holds"):
        table.add_column(name, justify="right" if name in ("value", "target") else "left")
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        holds = "" if row.holds is None else "yes" if row.holds else "[red]no[/]"
        table.add_row(
            row.case, row.metric, f"{row.value:,.3f}" if row.value < 100 else f"{row.value:,.0f}", target, holds
        )
    Console(width=110).print(table)
    if file:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=2))


def run_cases(doc: str, cases: Mapping[str, Callable[[], Iterable[Row]]], title: str) -> None:
    """Run the cases that the command line chooses by `--only` (default: all), and print their table."""
    parser = arguments(doc.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases))
    options, rows = parser.parse_args(), list[Row]()
    for name in options.only:
        began = time.perf_counter()
        rows += cases[name]()
        print(f" {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    publish(rows, title, options.json)
