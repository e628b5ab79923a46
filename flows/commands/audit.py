"""Implements `rollflow audit`, which checks from a run's storage alone that the run kept its guarantees. With
`--repair`, `rollflow audit` repairs a damaged log of the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pydantic import TypeAdapter
from rich.console import Console

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.tracking.anchors import read_anchors
from rollflow.flows.views.audit_table import print_report, show_audit
from rollflow.storage.audit.anchors import Anchor, check_anchors, parse_anchor
from rollflow.storage.audit.repair import plan_repairs, repair
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.run.user_code import describe_changed_code

REPORT = TypeAdapter(AuditReport)


def command(options: argparse.Namespace) -> int:
    """Audit the run and print the report, or repair the run's log. Return `FAILED` if the audit found a violation, or
    if the log is still damaged.
    """
    context = chosen_run(options)
    try:
        whole = repair_log(context, agreed=options.yes) if options.repair else _audit(context, options)
    except Missing:
        raise ConfigError(f"there is no run in {context.uri}; check the run id or --store") from None
    return OK if whole else FAILED


def _audit(context: RunContext, options: argparse.Namespace) -> bool:
    """Audit the run and print the report; return True if the audit found no violation."""
    anchors = [anchor for said in options.anchor for anchor in _collect_anchors(context, said)]
    report = show_audit(context.store, deep=options.deep, expected=expected_of(context))
    report.violations += check_anchors(context.store, anchors)
    for note in _describe_changed_code(context):
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps({"clean": report.clean, **REPORT.dump_python(report, mode="json")}))
    else:
        print_report(report, _read_shares(context))
    return report.clean


def _describe_changed_code(context: RunContext) -> Sequence[str]:
    """Describe which user-defined parts have changed since the run's start; return nothing if the run's records are
    damaged.
    """
    try:
        return describe_changed_code(context.config, context.created.own_code)
    except (Corrupt, Missing):
        return ()


def _collect_anchors(context: RunContext, said: str) -> Sequence[Anchor]:
    """Return the anchor (number and hash of a log entry) that the user gives. If the user gives "mlflow", return all
    anchors that the run has stored in MLflow.
    """
    if said != "mlflow":
        return [parse_anchor(said)]
    # `post_training` is imported here and not at the top, because it imports Prefect, which takes seconds.
    from rollflow.flows.post_training import tracking_place

    return read_anchors(context, tracking_place(context.config))


def _read_shares(context: RunContext) -> dict[str, float]:
    """Return the configured share of each prompt domain, or an empty mapping if the run's configuration is too damaged
    to read.
    """
    try:
        return context.config.shares
    except Corrupt:
        return {}


def repair_log(context: RunContext, *, agreed: bool, console: Console | None = None) -> bool:
    """Print how the run's log can be repaired, and repair the log if `agreed` is true. Return True if the log is
    undamaged now.

    Raises:
        Missing: the run does not exist.
        Corrupt: the log has damage that cannot be repaired.
    """
    console = console or Console(highlight=False)
    found = plan_repairs(context.store)
    if not found:
        console.print(f"the log of {context.uri} is not damaged", soft_wrap=True)
        return True
    for step in found:
        console.print(str(step), soft_wrap=True)
    if not agreed:
        console.print(
            "nothing was changed: make sure that no process works on the run, then add --yes to repair the log"
        )
        return False
    repair(context.store, found)
    console.print(f"done; {context.uri} can be resumed", soft_wrap=True)
    return True
