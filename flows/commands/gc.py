"""Implements `rollflow gc`, which lists or deletes old objects in a run's storage that the run's log does not
reference.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.views.console import format_duration
from rollflow.storage.audit.garbage import Orphan, collect, list_orphans, store_clock
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.context import RunContext

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def command(options: argparse.Namespace) -> int:
    """List or delete the orphans of a run, which are the stored objects that the run's log does not reference."""
    context = chosen_run(options)
    if options.json:
        found, size = collect_orphans(context, options.older_than, options.dry_run)
        objects = [asdict(orphan) for orphan in found]
        print(json.dumps({"objects": objects, "bytes": size, "deleted": not options.dry_run}))
    else:
        show_garbage(context, options.older_than, options.dry_run)
    return OK


def collect_orphans(context: RunContext, older_than: str, dry_run: bool) -> tuple[list[Orphan], int]:
    """Find the run's orphans (objects that its log does not reference) that are older than `older_than`, and delete
    them unless `dry_run` is true. Return the orphans and their total size in bytes.

    Raises:
        ConfigError: `older_than` is not an age such as "2h", or the run does not exist.
        Corrupt: the run's log is damaged, so it is unknown which stored objects it needs.
    """
    age = parse_age(older_than)
    context.created  # noqa: B018 - says which run is not there
    found = list_orphans(context.store, store_clock(context.store), age)
    return found, sum(orphan.size for orphan in found) if dry_run else collect(context.store, found)


def show_garbage(context: RunContext, older_than: str, dry_run: bool, console: Console | None = None) -> None:
    """Delete the run's orphans, which are objects that its log does not reference, and print them as a table. If
    `dry_run` is true, only print the orphans and delete nothing.
    """
    console = console or Console(highlight=False)
    found, freed = collect_orphans(context, older_than, dry_run)
    if not found:
        console.print(f"run {context.run_id}: nothing to collect that is older than {older_than}")
        return
    console.print(_table(context.run_id, found))
    console.print(f"{len(found)} objects, {freed:,} bytes {'would be deleted (--dry-run)' if dry_run else 'deleted'}")


def parse_age(text: str) -> float:
    """Convert an age such as 90s, 30m, 1h or 2d to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"--older-than {text!r} is not an age; write 90s, 30m, 1h or 2d")
    return float(match[1]) * SECONDS[match[2]]


def _table(run_id: str, found: list[Orphan]) -> Table:
    table = Table(title=f"objects that run {run_id} does not need", title_justify="left")
    table.add_column("object", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("age", justify="right")
    table.add_column("why", overflow="fold")
    for orphan in found:
        table.add_row(orphan.path, f"{orphan.size:,}", format_duration(orphan.age), orphan.why)
    return table
