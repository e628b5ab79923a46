"""Implements `rollflow status`, which shows the status of a run. With `--watch`, the status is shown until the run
ends; with `--all`, all runs of a store are listed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.locations import default_store, find_run, list_runs, locate_run, run_home
from rollflow.flows.services.deadline import call_in_time
from rollflow.flows.services.times import utc_time
from rollflow.flows.views.console import format_duration, open_view, render
from rollflow.flows.views.last_status import read_last_status, save_last_status
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.storage.errors import ConfigError, Corrupt, Unreachable
from rollflow.storage.objects import open_store
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.run.context import RunContext

# Longest time in seconds for all reads together, so that the command takes at most ten seconds.
STORE_SECONDS = 6.0
# Age in seconds from which a status counts as old. A run's supervisor writes a status once a second.
SILENT_SECONDS = 60.0
LOOK_SECONDS = 1.0  # Seconds between two updates of the live view.
COLUMNS = ("run", "began", "state", "version", "reward", "held-out")


@dataclass(frozen=True)
class StoredStatus:
    """The status of a run, read from the run's storage, and the age of that status. `age` is the number of seconds
    since the status was written.
    """

    context: RunContext
    status: RunStatus | None
    age: float = 0.0


def command(options: argparse.Namespace) -> int:
    """Show the status of one run, or list all runs of a store."""
    if options.all:
        return _list_runs(options)
    return _watch(find_run(options.run, options.store)) if options.watch else _show(options)


def _show(options: argparse.Namespace) -> int:
    """Print the run's status. If the run's storage does not answer, print the last status that this machine has
    seen.
    """
    try:
        found = call_in_time(lambda: _read_store(options), STORE_SECONDS, "the run's store")
    except Unreachable as error:
        return _show_seen(options, error)
    status = found.status
    if status is not None:
        save_last_status(run_home(), found.context.uri, status, found.age)
    if options.json:
        print((status or RunStatus(found.context.run_id, versions=found.context.config.versions)).to_json())
    elif status is None:
        print(f"run {found.context.run_id} was prepared and has not started")
    else:
        Console().print(render(status))
        if found.age > SILENT_SECONDS and not status.ended and status.phase != "paused":
            print(
                f"its last status is {format_duration(found.age)} old; "
                f"if its processes are gone, continue the run with: rollflow resume {found.context.uri}"
            )
    return OK


def _read_store(options: argparse.Namespace) -> StoredStatus:
    context = find_run(options.run, options.store)
    context.created  # noqa: B018 - says which run is not there
    status = read_status(context)
    age = time.time() - context.store.stat(STATUS).modified if status else 0.0
    return StoredStatus(context, status, age)


def _show_seen(options: argparse.Namespace, why: Unreachable) -> int:
    """Print the last status of the run that this machine has seen."""
    if options.run:
        seen = read_last_status(run_home(), locate_run(options.run, options.store or default_store()).uri)
    else:
        seen = read_last_status(run_home(), None, open_store(options.store or default_store()).uri)
    if seen is None:
        print(f"rollflow: {why}; this machine has seen nothing of the run", file=sys.stderr)
        return FAILED
    print(f"{why}; {format_duration(seen.age)} ago its state was:", file=sys.stderr, flush=True)
    if options.json:
        print(seen.status.to_json())
    else:
        Console().print(render(seen.status))
    return OK


def _watch(context: RunContext) -> int:
    """Show the run's status repeatedly until the run has ended."""
    status = RunStatus(context.run_id, versions=context.config.versions)
    with open_view(sys.stdout) as view:
        while not status.ended:
            status = read_status(context) or status
            view.show(status)
            if not status.ended:
                time.sleep(LOOK_SECONDS)
    return OK


def _list_runs(options: argparse.Namespace) -> int:
    """Print a line for each run of the store, from the oldest to the newest."""
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
    console.print(table if rows else "there are no runs yet; start one with `rollflow run RECIPE`")
    for row in rows:
        if why := row.get("why"):
            console.print(f"{row['run']}: {why}", soft_wrap=True, markup=False)
    return OK


def _read_row(context: RunContext) -> dict[str, Any]:
    """Return the values that `rollflow status --all --json` prints for one run. In the returned values, `state` is the
    phase in the run's last status, and `why` is the reason why a run cannot be read.
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
