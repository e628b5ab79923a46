"""`rollflow audit RUN`: prove a run's invariants from its storage alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pydantic import TypeAdapter

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.locations import find_run
from rollflow.flows.tracking.anchors import read_anchors
from rollflow.flows.views.audit_table import print_report, show_audit
from rollflow.storage.audit.anchors import Anchor, check_anchors, parse_anchor
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of

REPORT = TypeAdapter(AuditReport)


def command(options: argparse.Namespace) -> int:
    """Audit the run and print the report; return `FAILED` if there is a violation."""
    context = find_run(options.run, options.store)
    anchors = [anchor for said in options.anchor for anchor in _collect_anchors(context, said)]
    try:
        report = show_audit(context.store, deep=options.deep, expected=expected_of(context))
        report.violations += check_anchors(context.store, anchors)
    except Missing:
        raise ConfigError(
            f"run {options.run!r}: there is no such run in {context.uri}; check the run id or --store"
        ) from None
    if options.json:
        print(json.dumps({"clean": report.clean, **REPORT.dump_python(report, mode="json")}))
    else:
        print_report(report, _read_shares(context))
    return OK if report.clean else FAILED


def _collect_anchors(context: RunContext, said: str) -> Sequence[Anchor]:
    """Return the anchors that the user gives, or those in MLflow."""
    if said != "mlflow":
        return [parse_anchor(said)]
    # a late import, because it imports Prefect, which takes seconds
    from rollflow.flows.post_training import tracking_place

    return read_anchors(context, tracking_place(context.config))


def _read_shares(context: RunContext) -> dict[str, float]:
    """Return the configured shares of the domains; an empty mapping if the config is too damaged to read."""
    try:
        return context.config.shares
    except Corrupt:
        return {}
