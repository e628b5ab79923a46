"""Implements `rollflow stop`, which ends a run after its next policy version, or immediately with `--now`. The command
works on any machine that can write to the run's storage. `rollflow resume` continues a stopped run.
"""

from __future__ import annotations

import argparse
import sys
import time

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.storage.run_records.stop_requests import How, request_stop
from rollflow.tasks.run.context import RunContext

LOOK_SECONDS = 0.5
WAIT_SECONDS = 1800.0
# Seconds without a new status after which the run's supervisor (which writes one every second) counts as dead.
SILENT_SECONDS = 120.0
WORDS: dict[How, str] = {"stop": "to end at its next version", "cancel": "to end at once"}


def command(options: argparse.Namespace) -> int:
    """Ask the run to stop, and wait until it has ended unless `--no-wait` is given."""
    return end_run(chosen_run(options), "cancel" if options.now else "stop", wait=not options.no_wait)


def end_run(context: RunContext, how: How, *, wait: bool) -> int:
    """Ask the run to end, and print one sentence that says whether it has ended."""
    context.created  # noqa: B018 - says which run is not there
    status = read_status(context)
    if status is None or status.ended or status.phase == "paused":
        phase = status.phase if status else "not started"
        print(f"run {context.run_id} is not running ({phase}); {_resume_hint(context)}")
        return OK
    request_stop(context.store, how)
    if not wait:
        print(f"run {context.run_id} was asked {WORDS[how]}; {_resume_hint(context)}")
        return OK
    print(f"run {context.run_id} was asked {WORDS[how]}; waiting", file=sys.stderr, flush=True)
    return _await_end(context, status)


def _await_end(context: RunContext, status: RunStatus) -> int:
    began = moved = time.monotonic()
    while not (status.ended or status.phase == "paused"):
        if time.monotonic() - began > WAIT_SECONDS or time.monotonic() - moved > SILENT_SECONDS:
            print(
                f"rollflow: run {context.run_id} has not ended: at version {status.version} of {status.versions} "
                f"its last status is {time.monotonic() - moved:.0f} s old; it ends when it reads the request",
                file=sys.stderr,
            )
            return FAILED
        time.sleep(LOOK_SECONDS)
        before, status = status, read_status(context) or status
        if status.seconds != before.seconds:
            moved = time.monotonic()
    words = {"done": "is done", "failed": "failed", "paused": "is paused"}.get(status.phase, "has ended")
    print(f"run {context.run_id} {words} at version {status.version} of {status.versions}; {_resume_hint(context)}")
    return OK


def _resume_hint(context: RunContext) -> str:
    return f"continue the run with: rollflow resume {context.uri}"
