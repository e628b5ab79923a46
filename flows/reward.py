"""Defines the Prefect flow of the reward stage, in which worker processes and reward models score responses."""

from __future__ import annotations

from prefect import flow, get_run_logger

from rollflow.flows.keepalive.actors import ActorKeeper, WatchedActor
from rollflow.flows.keepalive.reward_models import ModelKeepers
from rollflow.flows.locations import await_run
from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.actors.reward import REWARD, start_reward
from rollflow.tasks.actors.statuses import RewardStatus
from rollflow.tasks.runtime.names import RunPlace

# No limit on the seconds without progress, because the reward actor is idle while it gets no responses.
NO_LIMIT = float("inf")


@flow(name="reward")
def reward(run: RunPlace, ray_address: str) -> int:
    """Score responses until the run is finished; return the number of scored responses."""
    context = await_run(run)
    with cluster.attached_cluster(ray_address, context.key, deadline_seconds=context.config.recovery.window_seconds):
        reward_actor = WatchedActor[RewardStatus](
            name=REWARD,
            start=lambda: start_reward(context),
            redone=lambda status: ("the scores it had not given yet", 0),
            patience=NO_LIMIT,
        )
        log = get_run_logger().info
        models = ModelKeepers(context, log)
        scored = int(ActorKeeper(context, reward_actor, log).run(models.check))
        models.finish()
        return scored
