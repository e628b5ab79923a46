"""`rollflow status [RUN]`: how a run stands."""

from __future__ import annotations

import argparse

from rich.console import Console

from rollflow.flows.commands import OK
from rollflow.flows.locations import find_run
from rollflow.flows.views.console import render
from rollflow.flows.views.status import RunStatus, read_status


def command(options: argparse.Namespace) -> int:
    """Print the run's `status.json` as the live view shows it."""
    context = find_run(options.run, options.store)
    context.created  # noqa: B018 - says which run is not there
    status = read_status(context)
    if options.json:
        print((status or RunStatus(context.run_id, versions=context.config.versions)).to_json())
    elif status is None:
        print(f"run {context.run_id} was prepared and has not started")
    else:
        Console().print(render(status))
    return OK
