"""Defines the Prefect flow of the train stage, in which one learner trains from the newest stored policy version to the
last one.
"""

from __future__ import annotations

from prefect import flow, get_run_logger

from rollflow.flows.keepalive.actors import ActorKeeper, WatchedActor
from rollflow.flows.keepalive.gpus import gpu_shares
from rollflow.flows.locations import await_run
from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.actors.learner import LEARNER, start_learner
from rollflow.tasks.actors.statuses import LearnerStatus
from rollflow.tasks.runtime.names import RunPlace


@flow(name="train")
def train(run: RunPlace, ray_address: str) -> int:
    """Train the run stored at `run` up to its last policy version; return the number of that version."""
    context = await_run(run)
    with cluster.attached_cluster(ray_address, context.key, deadline_seconds=context.config.recovery.window_seconds):
        learner = WatchedActor[LearnerStatus](
            name=LEARNER,
            start=lambda: start_learner(context, gpu_shares(context.config).learner, ray_address),
            redone=_describe_lost_work,
            # The learner itself gives up after `patience_seconds` without a batch, with an error that names the batch.
            patience=2 * context.config.rollout.patience_seconds,
        )
        return int(ActorKeeper(context, learner, get_run_logger().info).run())


def _describe_lost_work(status: LearnerStatus) -> tuple[str, int]:
    """Describe the work that is repeated after the learner died: one train step, or the learner's start if it had not
    restored a policy version.
    """
    return ("its start" if status.version < 0 else f"the step of version {status.version + 1}", 0)
