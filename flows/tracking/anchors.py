"""Writes a run's anchors (numbers and hashes of log entries) to its MLflow run and to a Prefect artifact. Somebody who
can change only the run's storage cannot change these anchors. An anchor proves that its log entry and all earlier
entries are unchanged. Anchors are written at the start of the supervising flow run, after each block of policy
versions, and at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollflow.flows.tracking.mlflow_run import ANCHOR_TAG, TrackingPlace, read_tags
from rollflow.storage.audit.anchors import Anchor, first_anchor, newest_anchor, parse_anchor
from rollflow.storage.errors import ConfigError, RollflowError, Unreachable
from rollflow.storage.log.state import RunState
from rollflow.tasks.run.context import RunContext

if TYPE_CHECKING:
    from rollflow.flows.tracking.tracking import Tracker
    from rollflow.flows.views.page import Page


def write_first_anchor(context: RunContext, tracker: Tracker, page: Page) -> None:
    """Write the anchors (number and hash) of log entry 0 and of the newest log entry to MLflow and to the run's page in
    Prefect, in the background.
    """
    with contextlib.suppress(RollflowError, OSError):
        first = first_anchor(context.store)
        tracker.log_anchor(first)
        page.anchor(str(first))
    write_anchor(context.log.state, tracker, page)


def write_anchor(state: RunState, tracker: Tracker, page: Page | None = None) -> None:
    """Write the anchor (number and hash) of the newest log entry in `state` to MLflow and to the run's page in Prefect,
    in the background.
    """
    anchor = newest_anchor(state)
    tracker.log_anchor(anchor)
    if page is not None:
        page.anchor(str(anchor))


def read_anchors(context: RunContext, place: TrackingPlace) -> Sequence[Anchor]:
    """Read a run's anchors (numbers and hashes of log entries) from the MLflow database or server at `place`.

    Raises:
        ConfigError: MLflow cannot be read, or has no anchor of this run.
    """
    try:
        tags = read_tags(place, context.key)
    except Unreachable as error:
        raise ConfigError(
            f"--anchor mlflow: {error}; give an anchor yourself as N:SHA256, the number and the hash of a log entry"
        ) from None
    anchors = [
        parse_anchor(f"{int(name.removeprefix(ANCHOR_TAG))}:{sha256}")
        for name, sha256 in sorted(tags.items())
        if name.startswith(ANCHOR_TAG)
    ]
    if not anchors:
        raise ConfigError(
            "--anchor mlflow: MLflow has no anchor of this run; give one yourself as N:SHA256, the number and the "
            "hash of a log entry"
        )
    return anchors
