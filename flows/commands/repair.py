"""`rollflow repair RUN`: shows how a damaged log can be repaired, and repairs it with `--yes`."""

from __future__ import annotations

import argparse

from rich.console import Console

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.locations import find_run
from rollflow.storage.audit.repair import plan_repairs, repair
from rollflow.storage.errors import ConfigError, Missing
from rollflow.tasks.run.context import RunContext


def command(options: argparse.Namespace) -> int:
    """Show how the log can be repaired, or repair it."""
    return OK if repair_log(find_run(options.run, options.store), agreed=options.yes) else FAILED


def repair_log(context: RunContext, *, agreed: bool, console: Console | None = None) -> bool:
    """Say how the run's log can be repaired, and repair it if the user has `agreed`; return whether the log is
    undamaged.

    Raises:
        ConfigError: there is no such run.
        Corrupt: the log has damage that cannot be repaired.
    """
    console = console or Console(highlight=False)
    try:
        found = plan_repairs(context.store)
    except Missing:
        raise ConfigError(f"there is no such run in {context.uri}; check the run id or --store") from None
    if not found:
        console.print(f"the log of {context.uri} is whole", soft_wrap=True)
        return True
    for cure in found:
        console.print(str(cure), soft_wrap=True)
    if not agreed:
        console.print("nothing was changed: make sure that nothing works on the run, then give --yes to do this")
        return False
    repair(context.store, found)
    console.print(f"done; {context.uri} can be resumed", soft_wrap=True)
    return True
