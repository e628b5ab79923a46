"""Defines the Prefect flow that supervises a training run, from its preparation to its summary.

    prepare --> claim --> rollout, reward, train --> follow the log, block by block of versions --> end in order
            --> evaluate --> audit --> summary

Each step of this diagram is a box on the flow run's page in Prefect.

The supervisor starts and watches the stages (rollout, reward and train); the run's data does not pass through the
supervisor. A supervisor reads the run's state from the run's storage, so a new supervisor can replace a dead one. To
take over a run, a supervisor appends an entry to the run's log; an older supervisor then gets the error `Deposed` and
stops. A run that a user has stopped, paused or cancelled can be resumed from its storage.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect import State, flow, get_run_logger
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import flow_run

from rollflow.flows.evaluate import evaluate_version
from rollflow.flows.keepalive.restart_history import reset_budgets
from rollflow.flows.keepalive.restarts import RestartsExhausted
from rollflow.flows.keepalive.run_watch import RunWatch
from rollflow.flows.keepalive.stages import Stages
from rollflow.flows.keepalive.supervisor_restart import follows_another
from rollflow.flows.locations import await_run, context_of, run_home, run_id_of, store_uri
from rollflow.flows.prepare import prepare
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.registration.prefect_api import requested_at
from rollflow.flows.services.reachability import check_store_reach
from rollflow.flows.steps import Steps, build_tags, cancel, run_name, split_blocks, suspend, tag
from rollflow.flows.tracking.anchors import write_anchor, write_first_anchor
from rollflow.flows.tracking.mlflow_payload import build_outcome, build_run_facts
from rollflow.flows.tracking.mlflow_run import TrackingPlace
from rollflow.flows.tracking.status_writer import StatusWriter, points_of
from rollflow.flows.tracking.tracking import Tracker
from rollflow.flows.views.actor_warnings import ActorWarnings
from rollflow.flows.views.config_history import select_shown
from rollflow.flows.views.inspect_values import write_newest_episodes
from rollflow.flows.views.log_lines import set_log_facts
from rollflow.flows.views.page import Page
from rollflow.flows.views.progress_blocks import block_rows, environment_rows, sandbox_rows
from rollflow.flows.views.status import Phase, record_end
from rollflow.flows.views.summary import SUMMARY, summarize
from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.garbage import sweep
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import ConfigError, RollflowError, StoreFailed, Unreachable
from rollflow.storage.log.configs import diff_trees
from rollflow.storage.log.entries import entry_path
from rollflow.storage.log.run_log import Writer
from rollflow.storage.run_records.stop_requests import RunEnded, take_back
from rollflow.tasks.environments.config import SingleTurnEnvironment
from rollflow.tasks.rollout.evaluation import is_evaluated, read_skipped
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.run.context import RunContext, claim
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.runtime.names import RunId, RunPlace


@flow(name="post-training", log_prints=False, flow_run_name=run_name, persist_result=True, result_serializer="json")
def post_training(
    config: RunConfig, run_id: RunId | None = None, storage: RunPlace | None = None
) -> dict[str, Any] | State:
    """Train a policy. `run_id` is the id of a new run, or of an existing run that is continued.

    If `storage` is given, the run at this URI is already prepared, for example by `rollflow run`.
    """
    step, logger = Steps(), get_run_logger()
    log = logger.info
    context = step("prepare", lambda: _open_or_create_run(config, run_id, storage), lambda made: made.run_id)
    set_log_facts(run=context.run_id, stage="supervisor")
    log("run %s in %s", context.run_id, context.uri)
    address = ray_address(context.config)
    supervisor = step("claim", lambda: _claim_run(context, address))
    place, missed = tracking_place(context.config), functools.partial(points_of, context)
    tracker = Tracker(place, context.run_id, context.created.config, context.key, missed, build_run_facts(context))
    with (
        _record_early_failure(context, supervisor),
        cluster.attached_cluster(address, context.key, deadline_seconds=context.config.recovery.window_seconds),
    ):
        check_store_reach(context.uri, context.config.cluster.address, cluster.list_nodes())
        stages = Stages(context, address, log, ActorWarnings(logger.warning).tell)
        writer, page = StatusWriter(context, stages, tracker), Page(context.run_id, log)
        following = RunWatch(stages, writer, supervisor)
        write_first_anchor(context, tracker, page)
        try:
            writer.refresh()  # Write the first status, which says that the run is starting.
            if is_trained(context):
                step("end the stages", stages.clear)
            else:
                _train(step, stages, following, writer, page)
            log("held-out accuracy %s", step("evaluate", lambda: _evaluate(writer), _format_accuracies))
            following.check_stop_requests()
            report = step("audit", lambda: _audit(writer), lambda found: "clean" if found.clean else "violations")
            following.check_stop_requests()
        except RunEnded as person:
            _give_up(stages, writer, supervisor, person)
            return _end_flow_run(context, person)
        except BaseException as error:
            _give_up(stages, writer, supervisor, error)
            raise
        return step("summarise", lambda: _finish(stages, writer, supervisor, report, page))


def _train(step: Steps, stages: Stages, following: RunWatch, writer: StatusWriter, page: Page) -> None:
    """Train from the newest stored policy version to the last one. Each block of versions is one step on the run's page
    in Prefect.
    """
    context = writer.context
    every = list(split_blocks(0, context.config.versions))
    mlflow = mlflow_page(writer.tracker, context.config, writer.tracker.page)
    page.links({"MLflow": mlflow, "storage": context.uri, "status": f"rollflow status {context.uri}"})
    following.heed_before()
    step("start the stages", stages.start)
    table_rows = list(block_rows(context, every))
    for first, last in split_blocks(context.policies.newest(), context.config.versions):
        name = f"versions {first} to {last}" if last > first else f"version {last}"
        step(name, functools.partial(following.to_version, last), lambda _: writer.figures)
        for warning in writer.warnings:
            get_run_logger().warning(warning)
        if writer.warnings:
            page.warn("\n\n".join(writer.warnings))
        write_anchor(context.log.state, writer.tracker, page)
        # Compute the newest rows again, because the evaluation of a block's versions may end after the block.
        newest = max(0, len(table_rows) - 2)
        table_rows[newest:] = block_rows(context, every[newest : len(table_rows) + 1])
        page.progress(table_rows)
        page.sandboxes(sandbox_rows(writer.sandboxes.totals()))
        page.environments(environment_rows(writer.environments.totals()))
        if not isinstance(context.config.environment, SingleTurnEnvironment):
            page.episodes(write_newest_episodes(context))
    step("end the stages", lambda: _end(following, stages, writer))


def _end(following: RunWatch, stages: Stages, writer: StatusWriter) -> None:
    following.to_end()
    writer.refresh("ending")
    stages.end()
    writer.refresh("ending")  # Store the last counts of the actors.


def _audit(writer: StatusWriter) -> AuditReport:
    """Audit the run (check from its storage that it kept its guarantees), and show the audit's progress in the run's
    status.
    """
    expected, further = expected_of(writer.context), functools.partial(writer.note_progress, "ending")
    return audit(writer.context.store, progress=lambda _: further(), expected=expected)


def _format_accuracies(accuracies: list[float]) -> str:
    return ", then ".join(f"{accuracy:.3f}" for accuracy in accuracies)


def _evaluate(writer: StatusWriter) -> list[float]:
    """Return the held-out accuracies of the first and the last policy version. A policy version without a stored
    evaluation is evaluated now.
    """
    context, note = writer.context, functools.partial(writer.note_progress, "evaluating")
    left_out = {
        evaluation.version for evaluation in read_skipped(context.store)
    }  # Leave out skipped evaluations, so that they do not fail a finished run.
    ends = [version for version in (0, context.config.versions) if version not in left_out]
    return [evaluate_version(context, version, note).accuracy for version in ends]


def _open_or_create_run(config: RunConfig, run_id: str | None, storage: str | None) -> RunContext:
    """Return the run's context, and prepare the run if it does not exist."""
    if storage:
        return await_run(storage)
    run_id = run_id or run_id_of(config.name, flow_run.id)
    context = replace(context_of(store_uri(config), run_id), patience=config.store.patience_seconds)
    if not context.store.exists(entry_path(0)):
        prepare(config, run_id, get_run_logger().info)
    for change in select_shown(diff_trees(tree_of(context.config), tree_of(config)), context.log.state.version + 1):
        fix = f"to change it: rollflow resume {context.uri} --set {change.key}=VALUE"
        words = "%s = %s applies, as recorded in the run's log, instead of %s; %s"
        get_run_logger().warning(words, change.key, change.before, change.after, fix)
    context.prompts()  # an error is raised here if the prompt files have changed since the run was created
    return context


def _claim_run(context: RunContext, address: str) -> Writer:
    """Make this flow run the only supervisor of the training run, add tags to it, and remove files that earlier
    supervisors left.
    """
    supervisor = claim(context, "supervisor", address, f"flow run {flow_run.id}")
    with contextlib.suppress(Unreachable):  # Training does not wait for an unreachable Prefect server.
        tag(build_tags(context.config, context.run_id, "supervisor"))
    _reset_budgets(context)
    _reopen(context)
    _sweep(context)
    return supervisor


def _reset_budgets(context: RunContext) -> None:
    """Forget the training run's earlier restarts and its old stop requests if this flow run was started by a user or a
    schedule.

    Stop requests are kept if they are newer than the request that created this flow run.
    """
    with contextlib.suppress(RollflowError):  # Training does not wait for an unreachable Prefect server or storage.
        if not follows_another(own := UUID(str(flow_run.id))):
            reset_budgets(context.store)
            take_back(context.store, requested_at(own))


def _reopen(context: RunContext) -> None:
    """Delete the summary of a run if more policy versions must be trained, because a summary means that the run has
    ended.
    """
    if context.store.exists(SUMMARY) and not is_trained(context):
        context.store.delete(SUMMARY)


def _sweep(context: RunContext) -> None:
    """Remove from the run's storage the unfinished files that killed processes have left. If this fails, only a warning
    is logged.
    """
    try:
        sweep(context.store)
    except (RollflowError, OSError) as error:  # For example, the storage service does not support the request.
        get_run_logger().warning("could not look for unfinished files that killed writers left: %s", error)


def is_trained(context: RunContext) -> bool:
    """Return whether all policy versions are trained and the last one is evaluated."""
    last = context.config.versions
    return context.policies.newest() == last and is_evaluated(context.store, last)


def ray_address(config: RunConfig) -> str:
    """Return the address of the Ray cluster that the recipe names, or of the private Ray cluster of this Prefect
    runner.
    """
    address = os.environ.get("ROLLFLOW_RAY_ADDRESS") if config.cluster.address == "auto" else config.cluster.address
    if not address:
        raise ConfigError(
            'cluster.address = "auto": this Prefect runner was started without a Ray cluster of its own; '
            "start the runner with `rollflow serve`, or give the address of a Ray head"
        )
    return address


def tracking_place(config: RunConfig) -> TrackingPlace:
    """Return the MLflow server that the recipe names, or the default SQLite database in the run home."""
    experiment = config.tracking.experiment or config.name
    if config.tracking.uri:
        return TrackingPlace(config.tracking.uri, experiment)
    return TrackingPlace.default(run_home(), experiment)


def mlflow_page(tracker: Tracker, config: RunConfig, otherwise: str) -> str:
    """Return the address of the run's page in MLflow, on the server that the recipe names or on the server of
    `rollflow serve`. Return `otherwise` if there is no server.
    """
    if config.tracking.uri:
        return tracker.page
    stack = os.environ.get("ROLLFLOW_MLFLOW_PAGE")
    return tracker.page_on(stack) if stack else otherwise


@contextlib.contextmanager
def _record_early_failure(context: RunContext, supervisor: Writer) -> Iterator[None]:
    """Record an error of the `with` block in the run's status, unless the error is recorded already."""
    try:
        yield
    except Exception as error:
        if supervisor.valid():
            record_end(context, *_describe_failure(error))
        raise


def _give_up(stages: Stages, writer: StatusWriter, supervisor: Writer, error: BaseException) -> None:
    """End the stages (rollout, reward and train) and record the reason. If a newer supervisor has taken over the run,
    no reason is recorded, and the stages end only if the newer supervisor uses another Ray cluster.
    """
    # The limit on restarts may be reached because a newer supervisor has replaced this supervisor's actors.
    if isinstance(error, RestartsExhausted):
        with contextlib.suppress(RollflowError):
            supervisor.log.follow()
    newer = None if supervisor.valid() else supervisor.log.state.claims["supervisor"]
    if newer is None or newer.cluster != stages.address:
        stages.abandon()
    if newer is not None:
        return  # The newer supervisor writes the run's status and logs to MLflow.
    phase, writer.failure = _describe_failure(error)
    # An error while writing the status must not hide the first error; a failed store may cause both.
    with contextlib.suppress(RollflowError):
        writer.refresh(phase)
    write_anchor(supervisor.log.state, writer.tracker)
    writer.tracker.finish("FAILED" if phase == "failed" else "KILLED")


def _describe_failure(error: BaseException) -> tuple[Phase, str]:
    """Return the phase and the reason that the status of an unfinished run shows."""
    if isinstance(error, Pause) or (isinstance(error, RunEnded) and error.pause):
        return "paused", "the run's flow run is paused; the run continues when its flow run is resumed"
    if isinstance(error, RunEnded):
        return "stopped", str(error)
    if isinstance(error, TerminationSignal):  # Prefect cancelled the flow run, or its runner is shutting down
        return "stopped", "the run's flow run was told to end"
    return "failed", f"{type(error).__name__}: {error}"


def _end_flow_run(context: RunContext, person: RunEnded) -> State:
    """End or suspend this Prefect flow run, after a user has stopped or paused the training run."""
    if person.pause:
        raise Pause(state=suspend())
    return cancel(f"{person}; continue the run with: rollflow resume {context.uri}")


def _finish(
    stages: Stages, writer: StatusWriter, supervisor: Writer, report: AuditReport, page: Page
) -> dict[str, Any]:
    context, tracker = writer.context, writer.tracker
    # Files that cannot be deleted are harmless, and are used if the run is resumed.
    with contextlib.suppress(StoreFailed, Unreachable):
        # Delete the weights of policy versions that were kept only until their evaluation.
        context.policies.prune(supervisor)
    idle = {role: status.idle for role, status in stages.statuses().items()}
    mlflow = mlflow_page(tracker, context.config, "rollflow serve")
    pages = {"prefect": os.environ.get("ROLLFLOW_PREFECT_PAGE", ""), "mlflow": mlflow}
    summary = summarize(context, report, idle, stages.rollout, pages)
    write_anchor(supervisor.log.state, tracker, page)
    plot = run_home() / "plots" / context.key / "reward.png"
    tracker.log_reward_plot(writer.curves, plot)
    with contextlib.suppress(RollflowError):  # A batch that was damaged after training does not make the run fail.
        tracker.log_ending(build_outcome(context, summary))
    tracker.finish("FINISHED")
    if plot.exists():
        context.store.put("reward.png", plot.read_bytes())
        page.plot(plot)
    every = list(split_blocks(0, context.config.versions))
    page.progress(list(block_rows(context, every)))  # Write all rows again, because the last evaluations are new.
    page.sandboxes(sandbox_rows(writer.sandboxes.totals()))
    page.environments(environment_rows(writer.environments.totals()))
    page.close()
    writer.refresh("done")
    return summary
