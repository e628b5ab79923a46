"""Defines the Prefect flow of the rollout stage, in which inference engines generate responses and a scheduler gives
them prompts.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from rollflow.flows.keepalive.actors import ActorKeeper, WatchedActor
from rollflow.flows.keepalive.engines import Engines
from rollflow.flows.locations import await_run
from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.actors.rollout import ROLLOUT, start_rollout
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.runtime.names import RunPlace

POLL_SECONDS = 1.0  # Seconds between two status calls to the scheduler. The engines are checked after each call.


@flow(name="rollout", log_prints=False)
def rollout(run: RunPlace, ray_address: str) -> None:
    """Generate, score and commit all training batches of the run stored at `run`."""
    context, log = await_run(run), get_run_logger().info
    with cluster.attached_cluster(ray_address, context.key, deadline_seconds=context.config.recovery.window_seconds):
        engines = Engines(context, log)

        def start() -> Any:
            engines.start()
            return start_rollout(context, ray_address)

        scheduler = WatchedActor[RolloutStatus](
            name=ROLLOUT,
            start=start,
            redone=lambda status: _describe_lost_work(status, context.config.group_size),
            patience=context.config.rollout.patience_seconds,
            poll=POLL_SECONDS,
        )
        ActorKeeper(context, scheduler, log).run(engines.look)
        engines.reporter.notes.flush()


def _describe_lost_work(status: RolloutStatus, group_size: int) -> tuple[str, int]:
    """Describe the work that is repeated after the scheduler died: the responses of unfinished groups are generated
    again.
    """
    groups = status.running + status.buffered
    return f"{groups} groups that were running, or in no batch yet", groups * group_size
