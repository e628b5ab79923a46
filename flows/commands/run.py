"""`rollflow run RECIPE`: start what the run needs, show it until it ends, and print its summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from rollflow.flows.commands import FAILED, INTERRUPTED, OK
from rollflow.flows.config import load_recipe
from rollflow.flows.locations import home, new_run_id
from rollflow.flows.prepare import prepare
from rollflow.flows.services.run_lock import hold_run
from rollflow.flows.session import Session, session_of
from rollflow.flows.views.audit_table import show_audit
from rollflow.flows.views.console import open_view, print_summary
from rollflow.flows.views.last_status import keep_seen
from rollflow.flows.views.status import RunStatus, read_status, record_end
from rollflow.flows.views.summary import SUMMARY
from rollflow.storage.errors import ConfigError, RollflowError, StoreFailed, Unreachable
from rollflow.storage.run_records.stop_requests import take_back
from rollflow.storage.run_records.usage import read_usage
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of


def command(options: argparse.Namespace) -> int:
    """Prepare a run and see it to its end."""
    config = load_recipe(options.recipe, options.set)
    run_id = new_run_id(config.name) if options.run_id is None else options.run_id
    context = prepare(config, run_id, lambda note: print(note, file=sys.stderr, flush=True))
    with hold_run(home(), context):
        return drive(context)


def drive(context: RunContext) -> int:
    """Start what the run needs, show it until it ends, and print its summary."""
    began = time.time()
    print(f"run {context.run_id} in {context.store.uri}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM: how a job scheduler says Ctrl-C
    try:
        _announce(context, began)
        with session_of(context) as session:
            status = _show(session, context, began)
    except KeyboardInterrupt:
        return _stopped(context)
    except RollflowError as error:  # a service does not start
        record_end(context, "failed", str(error))
        raise
    if status.phase == "stopped":  # by a person, elsewhere
        return _stopped(context)
    if status.phase == "failed":
        reason = status.messages[-1] if status.messages else "no reason was recorded"
        record_end(context, "failed", reason)
        print(f"rollflow: the run failed: {reason}", file=sys.stderr)
        print(_suggest_next_step(reason, context.uri), file=sys.stderr)
        return FAILED
    try:
        summary = _closed(context)
    except Unreachable as error:
        print(f"the run has ended. {error}; waiting for it", flush=True)
        summary = _closed(replace(context, patience=context.config.store.patience_seconds))
    print_summary(summary)
    return OK if summary["audit"] == "clean" else FAILED


def _suggest_next_step(reason: str, uri: str) -> str:
    """Say what the user can do after a failure; an unchanged run fails again if its config was the reason."""
    if ConfigError.__name__ in reason:
        change = f"rollflow resume {uri} --set KEY=VALUE"
        return f"unchanged, it would fail again: change what the error names ({change}), or start a new run"
    return f"go on with: rollflow resume {uri}"


def _closed(context: RunContext) -> dict[str, Any]:
    """The run's summary, with the CPU seconds of flows that were still at work when it was made."""
    summary: dict[str, Any] = json.loads(context.store.get(SUMMARY))
    summary["cpu_seconds"] = read_usage(context.store).totals()
    context.store.put(SUMMARY, json.dumps(summary, indent=2).encode())
    return summary


def _announce(context: RunContext, began: float) -> None:
    """Publish that the run starts: from now on `rollflow stop` is heard, and earlier requests are done.

    A store that does not answer now is waited for later.
    """
    with contextlib.suppress(Unreachable, StoreFailed):
        take_back(context.store, began)
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        starting = replace(last, phase="starting", messages=(), stages={}, flow_run="")
        context.store.put(STATUS, starting.to_json().encode())


def _show(session: Session, context: RunContext, began: float) -> RunStatus:
    """Submit the run and show it until it ends; returns its last status. Ctrl-C cancels it first."""
    status = kept = RunStatus(context.run_id)
    try:
        print(f"Prefect {session.page}{session.login}", flush=True)
        flow_run = session.submit(context, began)
        with open_view(sys.stdout) as view:
            for status in session.follow(context, flow_run):
                view.show(status)
                if status != kept:  # while the store is silent it is what was written before, and grows old
                    keep_seen(home(), context.uri, status)
                    kept = status
    except KeyboardInterrupt:
        print("\nstopping: ending the flows, the cluster and the server", flush=True)
        session.cancel(context)
        raise
    return status


def _stopped(context: RunContext) -> int:
    """After Ctrl-C, or a stop from elsewhere: say what is stored, and how to go on."""
    try:
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        context.store.put(STATUS, last.at_end("stopped").to_json().encode())
        report = show_audit(context.store, deep=False, expected=expected_of(context))
    except Unreachable as error:
        print(f"stopped; {error}\nonce it does, go on with: rollflow resume {context.uri}")
        return INTERRUPTED
    state = "clean" if report.clean else f"{len(report.violations)} violations"
    print(f"stopped at version {report.versions}; audit: {state}; go on with: rollflow resume {context.uri}")
    return INTERRUPTED
