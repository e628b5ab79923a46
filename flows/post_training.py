"""The supervisor: a run from its first version to its summary.

    prepare --> claim --> rollout, reward, train --> follow the log --> end in order --> evaluate --> summary

It decides and watches; it carries no data. It reads what it knows about the run from the run's storage, so that another
supervisor can take over when it dies. The newest claim on the run holds; an older supervisor is `Deposed` and stops.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from rollflow.flows.evaluate import evaluate
from rollflow.flows.keepalive.crashed import follows_another
from rollflow.flows.keepalive.restarts import GaveUp
from rollflow.flows.keepalive.spent import begin_anew
from rollflow.flows.keepalive.stages import Stages
from rollflow.flows.locations import await_run, context_of, home, run_id_of, store_uri
from rollflow.flows.prepare import prepare
from rollflow.flows.services import cluster
from rollflow.flows.services.reachability import check_store_reach
from rollflow.flows.views.mlflow_run import TrackingPlace
from rollflow.flows.views.run_facts import beginning, ending
from rollflow.flows.views.status_writer import StatusWriter, points
from rollflow.flows.views.summary import summarize
from rollflow.flows.views.tracking import Tracker
from rollflow.storage.errors import ConfigError, RollflowError, StoreFailed, Unreachable
from rollflow.storage.log.entries import entry_path
from rollflow.storage.log.garbage import sweep
from rollflow.storage.log.log import Writer
from rollflow.tasks.config import RunConfig
from rollflow.tasks.names import RunId, RunPlace
from rollflow.tasks.rollout.evaluation import evaluated, skipped
from rollflow.tasks.run_context import RunContext, claim

POLL_SECONDS = 0.5
TELL_SECONDS = 1.0


@flow(name="post-training", log_prints=False)
def post_training(config: RunConfig, run_id: RunId | None = None, storage: RunPlace | None = None) -> dict[str, Any]:
    """Train a policy. `run_id` names a new run, or one that exists and is to be continued.

    `storage` is given by the command line, which has prepared the run already: where its own storage lies.
    """
    log = get_run_logger().info
    context = await_run(storage) if storage else _prepared(config, run_id or run_id_of(config.name, flow_run.id))
    log("run %s in %s", context.run_id, context.uri)
    address = ray_address(context.config)
    supervisor = claim(context, "supervisor", address, f"flow run {flow_run.id}")
    _begin_anew(context)
    _sweep(context)
    place, missed = tracking_place(context.config), functools.partial(points, context)
    tracker = Tracker(place, context.run_id, context.created.config, context.key, missed, beginning(context))
    with cluster.attached(address, context.key):
        check_store_reach(context.uri, context.config.cluster.address, cluster.nodes())
        stages = Stages(context, address, log)
        writer = StatusWriter(context, stages, tracker)
        try:
            if not trained(context):
                stages.start()
                _follow(stages, writer, supervisor)
                writer.refresh("ending")
                stages.end()
        except BaseException as error:
            _give_up(stages, writer, supervisor, error)
            raise
        left_out = {one.version for one in skipped(context.store)}  # no reason to fail a run at its end
        ends = [version for version in (0, context.config.versions) if version not in left_out]
        accuracy = [evaluate(context.uri, version) for version in ends]
        log("held-out accuracy %s", [e["accuracy"] for e in accuracy])
        return _finish(stages, writer, supervisor)


def _prepared(config: RunConfig, run_id: str) -> RunContext:
    """The run in storage: new, or the one of that name."""
    context = replace(context_of(store_uri(config), run_id), patience=config.store.patience_seconds)
    if not context.store.exists(entry_path(0)):
        prepare(config, run_id)
    context.prompts()  # what it asks must be what it asked
    return context


def _begin_anew(context: RunContext) -> None:
    """Where a person or a schedule starts the run, no restart of before counts against its budgets."""
    with contextlib.suppress(RollflowError):  # a server or a store that does not answer is no reason not to train
        if not follows_another(UUID(str(flow_run.id))):
            begin_anew(context.store)


def _sweep(context: RunContext) -> None:
    """Remove what killed writers left unfinished. A store that does not allow it is no reason not to train."""
    try:
        sweep(context.store)
    except (RollflowError, OSError) as error:  # of a service that has no such request, say
        get_run_logger().warning("what killed writers left was not looked for: %s", error)


def trained(context: RunContext) -> bool:
    """Whether the stages have done all their work: at most the summary is missing."""
    last = context.config.versions
    return context.policies.newest() == last and evaluated(context.store, last)


def ray_address(config: RunConfig) -> str:
    """The cluster the recipe names, or the private one this runner was started with."""
    address = os.environ.get("ROLLFLOW_RAY_ADDRESS") if config.cluster.address == "auto" else config.cluster.address
    if not address:
        raise ConfigError(
            'cluster.address = "auto": this runner was started without a cluster of its own; '
            "start it with `rollflow serve`, or give the address of a Ray head"
        )
    return address


def tracking_place(config: RunConfig) -> TrackingPlace:
    """The MLflow the recipe names, or SQLite in the run home."""
    experiment = config.tracking.experiment or config.name
    if config.tracking.uri:
        return TrackingPlace(config.tracking.uri, experiment)
    return TrackingPlace.default(home(), experiment)


def _follow(stages: Stages, writer: StatusWriter, supervisor: Writer) -> None:
    """Watch until the last version is trained, loaded and evaluated: then rollout and train have ended."""
    told, answered, patience = float("-inf"), time.monotonic(), writer.context.config.store.patience_seconds
    while not stages.ended("rollout", "train"):
        stages.look()
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            try:
                supervisor.check()
                writer.refresh()
                answered = time.monotonic()
            except (Unreachable, OSError):  # a folder; for others the store itself waits so long
                if time.monotonic() - answered > patience:
                    raise
        time.sleep(POLL_SECONDS)


def _give_up(stages: Stages, writer: StatusWriter, supervisor: Writer, error: BaseException) -> None:
    """End the stages, unless another supervisor has them now, and say why."""
    if isinstance(error, GaveUp):  # because another one's roles deposed its own, perhaps
        with contextlib.suppress(RollflowError):
            supervisor.log.follow()
    newer = None if supervisor.valid() else supervisor.log.state.claims["supervisor"]
    if newer is None or newer.cluster != stages.address:
        stages.abandon()
    if newer is not None:
        return  # status and tracking are another's, too
    writer.failure = f"{type(error).__name__}: {error}"
    with contextlib.suppress(RollflowError):  # the store may be what failed; the error itself must come through
        writer.refresh("failed")
    writer.tracker.finish("FAILED")


def _finish(stages: Stages, writer: StatusWriter, supervisor: Writer) -> dict[str, Any]:
    context, tracker = writer.context, writer.tracker
    with contextlib.suppress(StoreFailed, Unreachable):  # what is left of it is garbage, or for who resumes the run
        context.policies.prune(supervisor)  # what waited for an evaluation
    idle = {role: status.idle for role, status in stages.statuses().items()}
    mlflow = tracker.page if context.config.tracking.uri else "rollflow serve"
    pages = {"prefect": os.environ.get("ROLLFLOW_PREFECT_PAGE", ""), "mlflow": mlflow}
    summary = summarize(context, idle, stages.rollout, pages)
    plot = home() / "plots" / context.key / "reward.png"
    tracker.log_reward_plot(writer.curves, plot)
    tracker.log_ending(ending(context, summary))
    tracker.finish("FINISHED")
    if plot.exists():
        context.store.put("reward.png", plot.read_bytes())
    writer.refresh("done")
    return summary
