"""`rollflow stop RUN`: end a run at its next version, from wherever its storage can be reached; it can be resumed."""

from __future__ import annotations

import argparse
import sys
import time

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.locations import find_run
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.storage.run_records.stop_requests import How, ask
from rollflow.tasks.run.context import RunContext

LOOK_SECONDS = 0.5
WAIT_SECONDS = 1800.0
SILENT_SECONDS = 120.0  # a supervisor says once a second how its run stands
WORDS: dict[How, str] = {"stop": "to end at its next version", "cancel": "to end now"}


def command(options: argparse.Namespace) -> int:
    """Ask for it, and wait until it has ended."""
    return end(find_run(options.run, options.store), "stop", wait=not options.no_wait)


def end(context: RunContext, how: How, *, wait: bool) -> int:
    """Ask the run to end, and say in one sentence what came of it."""
    context.created  # noqa: B018 - says which run is not there
    status = read_status(context)
    if status is None or status.ended or status.phase == "paused":
        print(f"run {context.run_id} is not at work ({status.phase if status else 'not started'}); {_resume(context)}")
        return OK
    ask(context.store, how)
    if not wait:
        print(f"run {context.run_id} was told {WORDS[how]}; {_resume(context)}")
        return OK
    print(f"run {context.run_id} was told {WORDS[how]}; waiting for that", file=sys.stderr, flush=True)
    return _await(context, status)


def _await(context: RunContext, status: RunStatus) -> int:
    began = moved = time.monotonic()
    while not (status.ended or status.phase == "paused"):
        if time.monotonic() - began > WAIT_SECONDS or time.monotonic() - moved > SILENT_SECONDS:
            print(
                f"rollflow: run {context.run_id} has not ended: at version {status.version} of {status.versions} "
                f"it was last heard of {time.monotonic() - moved:.0f} s ago; it ends once it hears",
                file=sys.stderr,
            )
            return FAILED
        time.sleep(LOOK_SECONDS)
        before, status = status, read_status(context) or status
        if status.seconds != before.seconds:
            moved = time.monotonic()
    words = {"done": "has come to its end", "failed": "failed", "paused": "is paused"}.get(status.phase, "has ended")
    print(f"run {context.run_id} {words} at version {status.version} of {status.versions}; {_resume(context)}")
    return OK


def _resume(context: RunContext) -> str:
    return f"go on with: rollflow resume {context.uri}"
