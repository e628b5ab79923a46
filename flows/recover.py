"""Defines the Prefect flow that restarts a training run whose supervisor (the flow `post-training`) has crashed. A
Prefect automation starts this flow after the crash.
"""

from __future__ import annotations

import time
from dataclasses import replace
from uuid import UUID

from prefect import flow, get_run_logger

from rollflow.flows.keepalive.supervisor_restart import is_up, read_flow_run, restart_supervisor, run_of, run_uri
from rollflow.flows.registration.prefect_api import call_until_answered
from rollflow.storage.errors import Unreachable
from rollflow.tasks.runtime.store_config import StoreConfig

START_SECONDS = 120.0
POLL_SECONDS = 0.5


@flow(name="recover", log_prints=False)
def recover(flow_run_id: str) -> str | None:
    """Restart the training run of a crashed `post-training` flow run. Return the id of the new flow run, or None if no
    restart was needed.
    """
    crashed = call_until_answered(lambda: read_flow_run(UUID(flow_run_id)))
    context = replace(run_of(crashed), patience=StoreConfig().patience_seconds)
    successor = call_until_answered(lambda: restart_supervisor(crashed.id, context))
    if successor is None or successor.pending is None:
        get_run_logger().info("run %s needs no recovery", run_uri(crashed))
        return None
    get_run_logger().info("run %s continues as flow run %s", run_uri(crashed), successor.flow_run)
    limit = time.monotonic() + START_SECONDS
    while not is_up(successor):
        if time.monotonic() > limit:
            raise Unreachable(
                f"no Prefect runner started flow run {successor.flow_run} within {START_SECONDS:g} s; check that "
                "`rollflow serve` runs"
            )
        time.sleep(POLL_SECONDS)
    successor.notes.flush()
    return str(successor.flow_run)
