"""Finds the training run that a command's options name."""

from __future__ import annotations

import argparse
import sys

from rollflow.flows.locations import find_run
from rollflow.tasks.run.context import RunContext


def chosen_run(options: argparse.Namespace) -> RunContext:
    """Return the run that the user names. If the user names no run, return the newest run and print its run id to
    standard error.

    Raises:
        ConfigError: the named run does not exist, or the store contains no run.
    """
    context = find_run(options.run, options.store)
    if options.run is None:
        print(f"newest run: {context.uri.rpartition('/')[2]}", file=sys.stderr, flush=True)
    return context
