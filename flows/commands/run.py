"""Implements `rollflow run RECIPE`, which starts the services of a run, shows the run until it ends, and prints its
summary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from rollflow.flows.commands.cli.exit_codes import FAILED, INTERRUPTED, OK
from rollflow.flows.config import load_recipe
from rollflow.flows.locations import new_run_id, run_home
from rollflow.flows.prepare import prepare
from rollflow.flows.services.run_lock import hold_run
from rollflow.flows.session import Session, session_of
from rollflow.flows.views.audit_table import show_audit
from rollflow.flows.views.console import open_view, print_summary
from rollflow.flows.views.last_status import save_last_status
from rollflow.flows.views.status import RunStatus, read_status, record_end
from rollflow.flows.views.summary import SUMMARY
from rollflow.storage.errors import ConfigError, RollflowError, StoreFailed, Unreachable
from rollflow.storage.run_records.stop_requests import take_back
from rollflow.storage.run_records.usage import read_usage
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of


def command(options: argparse.Namespace) -> int:
    """Prepare a new run from a recipe, and show the run until it ends."""
    config = load_recipe(options.recipe, options.set)
    run_id = new_run_id(config.name) if options.run_id is None else options.run_id
    context = prepare(config, run_id, lambda note: print(note, file=sys.stderr, flush=True))
    with hold_run(run_home(), context):
        return drive(context)


def drive(context: RunContext) -> int:
    """Start the services of a run, show the run until it ends, and print its summary."""
    began = time.time()
    print(f"run {context.run_id} in {context.store.uri}", flush=True)
    # Job schedulers end a command by SIGTERM, which has the same effect as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _announce(context, began)
        with session_of(context) as session:
            status = _show(session, context, began)
    except KeyboardInterrupt:
        return _report_stop(context)
    except RollflowError as error:  # a service did not start
        record_end(context, "failed", str(error))
        raise
    if status.phase == "stopped":  # The user stopped the run with `rollflow stop`.
        return _report_stop(context)
    if status.phase == "failed":
        reason = status.messages[-1] if status.messages else "no reason was recorded"
        record_end(context, "failed", reason)
        print(f"rollflow: the run failed: {reason}", file=sys.stderr)
        print(_suggest_next_step(reason, context.uri), file=sys.stderr)
        return FAILED
    try:
        summary = _complete_summary(context)
    except Unreachable as error:
        print(f"the run has ended. {error}; waiting for it", flush=True)
        summary = _complete_summary(replace(context, patience=context.config.store.patience_seconds))
    print_summary(summary)
    return OK if summary["audit"] == "clean" else FAILED


def _suggest_next_step(reason: str, uri: str) -> str:
    """Return a sentence that says what the user can do after a run has failed. Resuming unchanged would fail again if
    the configuration is invalid.
    """
    if ConfigError.__name__ in reason:
        change = f"rollflow resume {uri} --set KEY=VALUE"
        return (
            f"unchanged, it would fail again: change what the error names ({change}), or start a new run; keys of "
            "policy can change only in a new run"
        )
    return f"continue the run with: rollflow resume {uri}"


def _complete_summary(context: RunContext) -> dict[str, Any]:
    """Update the CPU seconds in the run's summary, which was written while some Prefect flows were still running.
    Return the summary.
    """
    summary: dict[str, Any] = json.loads(context.store.get(SUMMARY))
    summary["cpu_seconds"] = read_usage(context.store).totals()
    context.store.put(SUMMARY, json.dumps(summary, indent=2).encode())
    return summary


def _announce(context: RunContext, began: float) -> None:
    """Write a status that says that the run is starting, and remove old stop requests.

    A storage error is ignored, because the run itself waits for its storage later.
    """
    with contextlib.suppress(Unreachable, StoreFailed):
        take_back(context.store, began)
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        starting = replace(last, phase="starting", messages=(), stages={}, flow_run="")
        context.store.put(STATUS, starting.to_json().encode())


def _show(session: Session, context: RunContext, began: float) -> RunStatus:
    """Start the Prefect flow run that supervises the training run, and show the training run until it ends. Return the
    last status of the training run. Ctrl-C cancels the run.
    """
    status = kept = RunStatus(context.run_id)
    try:
        print(f"Prefect {session.page}{session.login}", flush=True)
        flow_run = session.submit(context, began)
        with open_view(sys.stdout) as view:
            for status in session.follow(context, flow_run):
                view.show(status)
                # do not store an unchanged status again, so that its age grows while the run's storage fails
                if status != kept:
                    save_last_status(run_home(), context.uri, status)
                    kept = status
    except KeyboardInterrupt:
        print("\nstopping: ending the flows, the cluster and the server", flush=True)
        session.cancel(context)
        raise
    return status


def _report_stop(context: RunContext) -> int:
    """Print which results are stored and how to resume the run, after Ctrl-C or `rollflow stop`."""
    try:
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        context.store.put(STATUS, last.at_end("stopped").to_json().encode())
        report = show_audit(context.store, deep=False, expected=expected_of(context))
    except Unreachable as error:
        print(f"stopped; {error}\nonce it does, continue the run with: rollflow resume {context.uri}")
        return INTERRUPTED
    state = "clean" if report.clean else f"{len(report.violations)} violations"
    print(f"stopped at version {report.versions}; audit: {state}; continue the run with: rollflow resume {context.uri}")
    return INTERRUPTED
