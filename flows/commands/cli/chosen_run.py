"""Decides which run a command is about."""

from __future__ import annotations

import argparse
import sys

from rollflow.flows.locations import find_run
from rollflow.tasks.run.context import RunContext


def chosen_run(options: argparse.Namespace) -> RunContext:
    """Return the run that the options name. Without a name, return the newest run, and print its id to standard error.

    Raises:
        ConfigError: there is no such run, or no run at all.
    """
    context = find_run(options.run, options.store)
    if options.run is None:
        print(f"newest run: {context.uri.rpartition('/')[2]}", file=sys.stderr, flush=True)
    return context
