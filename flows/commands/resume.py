"""Implements `rollflow resume`, which continues a run that was stopped or has ended. With `--set`, the run's
configuration is changed first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rollflow.flows.commands import run
from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.config import check_new_run, override_config
from rollflow.flows.locations import run_home
from rollflow.flows.preflight import check_addresses, recheck
from rollflow.flows.services.run_lock import hold_run
from rollflow.flows.views.config_history import change_sentence
from rollflow.flows.views.status import read_status
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config_changes import change_config, check_change, tree_of
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.scorer_versions import list_changed_scorers
from rollflow.tasks.run.user_code import changed_code, check_own_parts

ALIVE_SECONDS = 5.0  # Seconds within which a living supervisor process writes a new status.


def command(options: argparse.Namespace) -> int:
    """Continue the run from the state in its storage, and show the run until it ends."""
    context = chosen_run(options)
    with hold_run(run_home(), context):
        if options.set:
            record_change(context, options.set)
        check_addresses(context.config, context.uri)
        check_own_parts(context.config)
        for key in changed_code(context.config, context.created.own_code):
            note = f"{key}.path: the file has changed since the run's start; the next versions use the new file"
            print(note, file=sys.stderr)
        for change in list_changed_scorers(context):
            print(f"{change}; `rollflow rejudge` shows what it decides differently", file=sys.stderr)
        context.prompts()  # an error is raised here if the prompts have changed since the run's start
        return run.drive(context)


def record_change(context: RunContext, overrides: Sequence[str]) -> None:
    """Record a changed configuration in the run's log, unless the run already has this configuration.

    Raises:
        ConfigError: one of the keys cannot change, or another process (a supervisor) is working on the run.
    """
    before = context.config
    after = override_config(tree_of(before), overrides)
    if after == before:
        return
    check_new_run(after, before)
    check_change(context, after)
    recheck(after, context)
    if is_under_way(context):
        raise ConfigError(
            f"run {context.run_id!r} is running, and a config can change only while its run is stopped; stop the "
            f"run first: rollflow stop {context.uri}"
        )
    if change_config(context, after):
        print(change_sentence(context.configs[-1]), flush=True)


def is_under_way(context: RunContext) -> bool:
    """Return whether a supervisor process is working on the run. A working supervisor writes a new status of the run
    within `ALIVE_SECONDS`.
    """
    first = read_status(context)
    if first is None or first.ended:
        return False
    limit = time.monotonic() + ALIVE_SECONDS
    while time.monotonic() < limit:
        time.sleep(0.5)
        now = read_status(context)
        if now is None or now.ended:
            return False
        if (now.seconds, now.flow_run) != (first.seconds, first.flow_run):
            return True
    return False
