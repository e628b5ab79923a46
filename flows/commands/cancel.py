"""`rollflow cancel RUN`: end a run at once, from any place that reaches its storage; the run can be resumed."""

from __future__ import annotations

import argparse

from rollflow.flows.commands.stop import end_run
from rollflow.flows.locations import find_run


def command(options: argparse.Namespace) -> int:
    """Ask the run to end at once, and wait until the run has ended."""
    return end_run(find_run(options.run, options.store), "cancel", wait=not options.no_wait)
