"""Starts a run's Ray actors before its Prefect flows start. Starting actors and flows in parallel saves time, because
both spend most of their start on imports.
"""

from __future__ import annotations

from typing import Any

from rollflow.flows.keepalive.gpus import gpu_shares
from rollflow.tasks.actors.learner import start_learner
from rollflow.tasks.actors.reward import start_reward
from rollflow.tasks.actors.reward_models import model_names, start_model
from rollflow.tasks.actors.rollout import start_rollout
from rollflow.tasks.actors.run_engines import start_engine
from rollflow.tasks.run.context import RunContext


def begin_actors(context: RunContext, address: str) -> list[Any]:
    """Start the Ray actors that do not exist yet, without waiting for them, and return references to the start calls.

    The caller must keep the returned references, because Ray prints the error of a call whose reference is dropped.

    Raises:
        ConfigError: the cluster has too few GPUs for the run's actors.
    """
    shares = gpu_shares(context.config)
    engines = [start_engine(context, number, shares.engine) for number in range(context.config.engine.replicas)]
    learner = start_learner(context, shares.learner, address)
    models = [start_model(context, *place) for place in model_names(context.config).values()]
    begun = [*(engine.start.remote() for engine in engines), learner.run.remote()]
    begun += [model.begin.remote() for model in models]
    return [*begun, start_rollout(context, address).begin.remote(), start_reward(context).begin.remote()]
