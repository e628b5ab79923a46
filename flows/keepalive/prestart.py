"""Actors begin before the flows of their stages do, which then find them.

Most of their start is imports, as it is of a flow's process; so these go on side by side.
"""

from __future__ import annotations

from typing import Any

from rollflow.flows.keepalive.gpus import gpu_shares
from rollflow.tasks.actors.learner import start_learner
from rollflow.tasks.actors.reward import start_reward
from rollflow.tasks.actors.rollout import start_engine, start_rollout
from rollflow.tasks.run.context import RunContext


def begin_actors(context: RunContext, address: str) -> list[Any]:
    """Start those that are not there, or find them; what comes of it is for their stages to see.

    The references are to be kept: of a call that nobody waits for any more Ray prints the error.

    Raises:
        ConfigError: the cluster has too few GPUs for them.
    """
    shares = gpu_shares(context.config)
    engines = [start_engine(context, number, shares.engine) for number in range(context.config.engine.replicas)]
    learner = start_learner(context, shares.learner, address)
    begun = [*(engine.start.remote() for engine in engines), learner.run.remote()]
    return [*begun, start_rollout(context, address).begin.remote(), start_reward(context).begin.remote()]
