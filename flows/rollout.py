"""The rollout stage: the engines, and the scheduler that feeds them."""

from __future__ import annotations

from prefect import flow, get_run_logger

from rollflow.flows import cluster
from rollflow.flows.home import attach_run
from rollflow.flows.supervision import gpu_share, watch
from rollflow.tasks.rollout.actor import start_engines, start_rollout

START_SECONDS = 900.0


@flow(name="rollout", log_prints=False)
def rollout(run: str, ray_address: str) -> int:
    """Generate, score and commit every batch of the run stored at `run`; returns the trajectories made."""
    context = attach_run(run)
    with cluster.attached(ray_address, context.run_id):
        engines = start_engines(context, gpu_share(context.config))
        for i, engine in enumerate(engines):
            cluster.call(engine.start.remote(), START_SECONDS, f"engine {i} to start")
        get_run_logger().info("%d engine(s) ready", len(engines))
        actor = start_rollout(context)
        patience = context.config.rollout.patience_seconds
        watch(actor.run.remote(), actor.status.remote, patience, get_run_logger().info, "the rollout scheduler")
        made = cluster.call(actor.status.remote(), START_SECONDS, "the scheduler's last status")
        return int(made["trajectories"])
