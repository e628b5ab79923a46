"""`rollflow status [RUN]`: shows the status of a run."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from rich.console import Console

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.locations import default_store, find_run, locate_run, run_home
from rollflow.flows.services.deadline import call_in_time
from rollflow.flows.views.console import format_duration, render
from rollflow.flows.views.last_status import read_last_status, save_last_status
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects import open_store
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.run.context import RunContext

STORE_SECONDS = 6.0  # deadline of all reads together; with the imports, the command takes at most ten seconds
# age at which a status counts as old; a supervisor writes the status once a second while it follows its stages
SILENT_SECONDS = 60.0


@dataclass(frozen=True)
class StoredStatus:
    """A run's status as read from the store. `age` is the time since the status was written, in seconds."""

    context: RunContext
    status: RunStatus | None
    age: float = 0.0


def command(options: argparse.Namespace) -> int:
    """Print the run's status as the live view does; if the store does not answer, print the last status seen here."""
    try:
        found = call_in_time(lambda: _read_store(options.run, options.store), STORE_SECONDS, "the run's store")
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
                f"it wrote no status for {format_duration(found.age)}; "
                f"if its processes are gone, go on with: rollflow resume {found.context.uri}"
            )
    return OK


def _read_store(run: str | None, store: str | None) -> StoredStatus:
    context = find_run(run, store)
    context.created  # noqa: B018 - says which run is not there
    status = read_status(context)
    age = time.time() - context.store.stat(STATUS).modified if status else 0.0
    return StoredStatus(context, status, age)


def _show_seen(options: argparse.Namespace, why: Unreachable) -> int:
    """Print the last status that this machine has seen, because the store does not answer."""
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
