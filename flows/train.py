"""The train stage: one learner, from the newest version in storage to the last."""

from __future__ import annotations

import ray
from prefect import flow, get_run_logger

from rollflow.flows import cluster
from rollflow.flows.home import home
from rollflow.flows.supervision import watch
from rollflow.tasks.run import RunContext

LEARNER = "learner"


@flow(name="train")
def train(run: str, ray_address: str) -> int:
    """Train the run stored at `run` up to its last version; returns that version."""
    context = RunContext(run, home() / "cache" / run.rpartition("/")[2])
    with cluster.attached(ray_address, context.run_id):
        actor = cluster.start_learner(context)
        patience = context.config.rollout.patience_seconds * 2
        return int(watch(actor.run.remote(), actor.status.remote, patience, get_run_logger().info, "the learner"))
