"""`rollflow top [RUN]`: watch a run that works, as who started it sees it. It goes on when nobody watches any more."""

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
    """Show the run's status again and again until the run has ended."""
    context = find_run(options.run, options.store)
    status = RunStatus(context.run_id, versions=context.config.versions)
    with open_view(sys.stdout) as view:
        while not status.ended:
            status = read_status(context) or status
            view.show(status)
            if not status.ended:
                time.sleep(LOOK_SECONDS)
    return OK
