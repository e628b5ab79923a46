"""`rollflow top [RUN]`: watches a running run, with the view of `rollflow run`. The run goes on when `top` ends."""

from __future__ import annotations

import argparse
import sys
import time

from rollflow.flows.commands import OK
from rollflow.flows.locations import find_run
from rollflow.flows.views.console import open_view
from rollflow.flows.views.status import RunStatus, read_status

LOOK_SECONDS = 1.0


def command(options: argparse.Namespace) -> int:
    """Show the run's status repeatedly until the run has ended."""
    context = find_run(options.run, options.store)
    status = RunStatus(context.run_id, versions=context.config.versions)
    with open_view(sys.stdout) as view:
        while not status.ended:
            status = read_status(context) or status
            view.show(status)
            if not status.ended:
                time.sleep(LOOK_SECONDS)
    return OK
