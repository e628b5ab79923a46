"""Names and starts the Ray actors of a run's inference engines."""

from __future__ import annotations

import functools
from typing import Any

import ray

from rollflow.storage.log.run_log import Log
from rollflow.storage.recent_responses import RecentResponses
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.actors.early_imports import Kind, imports_vllm
from rollflow.tasks.actors.engine import EngineActor
from rollflow.tasks.actors.gauges import collects_metrics
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options, engine_cpus
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.engines.past_responses import KEPT_TOKENS
from rollflow.tasks.engines.speculation import drafts_from_past
from rollflow.tasks.run.context import RunContext

EVALUATION = -1  # number of the engine that runs only evaluations


def start_engine(context: RunContext, number: int, gpus: float) -> Any:
    """Start the Ray actor of the run's engine `number` with `gpus` GPUs, or find the actor if it is running."""
    config, engine = context.config, context.config.engine
    if number == EVALUATION:
        engine = context.evaluation_engine(on_cpu=not gpus)
        gpus = gpus if engine == config.engine else 0.0
    imports: Kind | None = "engine" if imports_vllm(engine) else None
    placed = actor_options(config, "engine", engine_cpus(engine), gpus=gpus, imports=imports)
    options = {"lifetime": "detached", "get_if_exists": True, "max_concurrency": 1024}
    remote = ray.remote(EngineActor).options(name=engine_name(number), **placed, **options)
    return remote.remote(functools.partial(build_run_engine, context, engine), Lease.of(context))


def build_run_engine(context: RunContext, engine: EngineConfig) -> Engine:
    """Create an inference engine of the run on this node, without starting the engine."""
    dtype, seeded = context.config.policy.dtype, context.config.rollout.leaves_behind
    told_as = context.run_id if collects_metrics() else ""
    read_past = None
    if drafts_from_past(engine):  # a thread of the engine reads this log, so it is not the `Log` object of `context`
        read_past = RecentResponses(TrajectoryStore(Log(context.store)), KEPT_TOKENS).read
    folder = context.policy_folder
    return build_engine(engine, folder, dtype=dtype, seeded=seeded, told_as=told_as, read_past=read_past)


def engine_name(number: int) -> str:
    """Return the name of the Ray actor of an inference engine."""
    return "engine-evaluation" if number == EVALUATION else f"engine-{number}"
