"""`rollflow list`: lists the runs of a store, the newest last."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rollflow.flows.commands import OK
from rollflow.flows.locations import list_runs
from rollflow.flows.services.times import utc_time
from rollflow.flows.views.status import read_status
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.tasks.run.context import RunContext

COLUMNS = ("run", "began", "state", "version", "reward", "held-out")


def command(options: argparse.Namespace) -> int:
    """Print a line for each run."""
    rows = sorted(map(_read_row, list_runs(options.store)), key=lambda row: row["began"] or 0.0)
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return OK
    table = Table(box=SIMPLE)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name != "run")
    for row in rows:
        table.add_row(*(_format_cell(row, name) for name in COLUMNS))
    console = Console(highlight=False)
    console.print(table if rows else "no runs yet; start one with `rollflow run RECIPE`")
    for row in rows:
        if why := row.get("why"):
            console.print(f"{row['run']}: {why}", soft_wrap=True, markup=False)
    return OK


def _read_row(context: RunContext) -> dict[str, Any]:
    """Return the values that `--json` prints for one run. `state` is the last recorded phase; `why` says why a run is
    unreadable.
    """
    row: dict[str, Any] = dict.fromkeys((*COLUMNS, "versions")) | {
        "run": context.uri.rpartition("/")[2],
        "uri": context.uri,
    }
    try:
        row |= {"began": context.created_at, "state": "not started", "versions": context.config.versions}
    except (ConfigError, Corrupt) as error:
        return row | {"state": "unreadable", "why": str(error)}
    if status := read_status(context):
        row |= {"state": status.phase, "version": status.version, "reward": status.reward}
        row["held-out"] = status.accuracy[-1][1] if status.accuracy else None
    return row


def _format_cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if name == "began" and value:
        return utc_time(value)[:16] + "Z"
    if name == "version" and value is not None:
        return f"{value} of {row['versions']}"
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
