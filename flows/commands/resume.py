"""`rollflow resume RUN`: go on with a run that was stopped."""

from __future__ import annotations

import argparse
import sys

from rollflow.flows.commands import run
from rollflow.flows.locations import find_run, home
from rollflow.flows.preflight import check_addresses
from rollflow.flows.services.run_lock import hold_run
from rollflow.tasks.own_parts import changed_code, check_own_parts


def command(options: argparse.Namespace) -> int:
    """See the run to its end, from where its storage says it is."""
    context = find_run(options.run, options.store)
    with hold_run(home(), context):
        check_addresses(context.config, context.uri)
        check_own_parts(context.config)
        for key in changed_code(context.config, context.created.own_code):
            said = f"{key}.path: its file is not what it was when the run began; the next versions use it"
            print(said, file=sys.stderr)
        context.prompts()  # what it asks must be what it asked
        return run.drive(context)
