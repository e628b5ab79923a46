"""`rollflow status [RUN]`: how a run stands."""

from __future__ import annotations

import argparse

from rich.console import Console

from rollflow.flows.commands import OK
from rollflow.flows.locations import find_run
from rollflow.flows.views.console import render
from rollflow.flows.views.status import read_status


def command(options: argparse.Namespace) -> int:
    """Print the run's `status.json` as the live view shows it."""
    context = find_run(options.run, options.store)
    status = read_status(context)
    if status is None:
        print(f"run {context.run_id} was prepared and has not started")
    else:
        Console().print(render(status))
    return OK
