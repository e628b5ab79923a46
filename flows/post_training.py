"""The supervisor: a run from its first version to its summary.

    prepare --> claim --> rollout, reward, train --> follow the log, block by block of versions --> end in order
            --> evaluate --> audit --> summary

Each is a step, which is a box on the flow run's page.

It decides and watches; it carries no data. It reads what it knows about the run from the run's storage, so that another
supervisor can take over when it dies. The newest claim on the run holds; an older supervisor is `Deposed` and stops.
A person who stops, pauses or cancels the run leaves one that goes on from its storage.
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
from rollflow.flows.keepalive.restart_history import begin_anew
from rollflow.flows.keepalive.restarts import GaveUp
from rollflow.flows.keepalive.run_watch import Following
from rollflow.flows.keepalive.stages import Stages
from rollflow.flows.keepalive.supervisor_restart import follows_another
from rollflow.flows.locations import await_run, context_of, home, run_id_of, store_uri
from rollflow.flows.prepare import prepare
from rollflow.flows.services import cluster
from rollflow.flows.services.prefect_api import asked_for
from rollflow.flows.services.reachability import check_store_reach
from rollflow.flows.steps import Steps, blocks, cancel, run_name, suspend, tag, tags
from rollflow.flows.views.actor_warnings import ActorWarnings
from rollflow.flows.views.anchors import write_anchor, write_first_anchor
from rollflow.flows.views.config_history import select_shown
from rollflow.flows.views.log_lines import about
from rollflow.flows.views.mlflow_payload import beginning, ending
from rollflow.flows.views.mlflow_run import TrackingPlace
from rollflow.flows.views.page import Page
from rollflow.flows.views.progress_blocks import rows
from rollflow.flows.views.status import Phase, record_end
from rollflow.flows.views.status_writer import StatusWriter, points
from rollflow.flows.views.summary import SUMMARY, summarize
from rollflow.flows.views.tracking import Tracker
from rollflow.storage.errors import ConfigError, RollflowError, StoreFailed, Unreachable
from rollflow.storage.log.audit import audit
from rollflow.storage.log.configs import differences
from rollflow.storage.log.entries import entry_path
from rollflow.storage.log.garbage import sweep
from rollflow.storage.log.report import AuditReport
from rollflow.storage.log.run_log import Writer
from rollflow.storage.run_records.stop_requests import Ended, take_back
from rollflow.tasks.rollout.evaluation import evaluated, skipped
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.run.context import RunContext, claim
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.runtime.names import RunId, RunPlace


@flow(name="post-training", log_prints=False, flow_run_name=run_name, persist_result=True, result_serializer="json")
def post_training(
    config: RunConfig, run_id: RunId | None = None, storage: RunPlace | None = None
) -> dict[str, Any] | State:
    """Train a policy. `run_id` names a new run, or one that exists and is to be continued.

    `storage` is given by the command line, which has prepared the run already: where its own storage lies.
    """
    step, logger = Steps(), get_run_logger()
    log = logger.info
    context = step("prepare", lambda: _prepared(config, run_id, storage), lambda made: made.run_id)
    about(run=context.run_id, stage="supervisor")
    log("run %s in %s", context.run_id, context.uri)
    address = ray_address(context.config)
    supervisor = step("claim", lambda: _claimed(context, address))
    place, missed = tracking_place(context.config), functools.partial(points, context)
    tracker = Tracker(place, context.run_id, context.created.config, context.key, missed, beginning(context))
    with (
        _end_recorded(context, supervisor),
        cluster.attached(address, context.key, deadline_seconds=context.config.recovery.window_seconds),
    ):
        check_store_reach(context.uri, context.config.cluster.address, cluster.nodes())
        stages = Stages(context, address, log, ActorWarnings(logger.warning).tell)
        writer, page = StatusWriter(context, stages, tracker), Page(context.run_id, log)
        following = Following(stages, writer, supervisor)
        write_first_anchor(context, tracker, page)
        try:
            writer.refresh()  # publish that the run starts
            if trained(context):
                step("end the stages", stages.clear)
            else:
                _train(step, stages, following, writer, page)
            log("held-out accuracy %s", step("evaluate", lambda: _evaluate(writer), _accuracies))
            following.heed_after()
            report = step("audit", lambda: _audit(writer), lambda found: "clean" if found.clean else "violations")
            following.heed_after()
        except Ended as person:
            _give_up(stages, writer, supervisor, person)
            return _left(context, person)
        except BaseException as error:
            _give_up(stages, writer, supervisor, error)
            raise
        return step("summarise", lambda: _finish(stages, writer, supervisor, report, page))


def _train(step: Steps, stages: Stages, following: Following, writer: StatusWriter, page: Page) -> None:
    """From where the run stands to its last version, a step for each block of versions."""
    context = writer.context
    every = list(blocks(0, context.config.versions))
    mlflow = mlflow_page(writer.tracker, context.config, writer.tracker.page)
    page.links({"MLflow": mlflow, "storage": context.uri, "status": f"rollflow status {context.uri}"})
    following.heed_before()
    step("start the stages", stages.start)
    told = list(rows(context, every))
    for first, last in blocks(context.policies.newest(), context.config.versions):
        name = f"versions {first} to {last}" if last > first else f"version {last}"
        step(name, functools.partial(following.to_version, last), lambda _: writer.figures)
        if writer.no_signal:
            get_run_logger().warning(writer.no_signal)
            page.warn(writer.no_signal)
        write_anchor(context.log.state, writer.tracker, page)
        newest = max(0, len(told) - 2)  # an evaluation may come later than its block
        told[newest:] = rows(context, every[newest : len(told) + 1])
        page.progress(told)
    step("end the stages", lambda: _end(following, stages, writer))


def _end(following: Following, stages: Stages, writer: StatusWriter) -> None:
    following.to_end()
    writer.refresh("ending")
    stages.end()


def _audit(writer: StatusWriter) -> AuditReport:
    """Audit the run; the status shows the progress."""
    expected, further = expected_of(writer.context), functools.partial(writer.note_progress, "ending")
    return audit(writer.context.store, progress=lambda _: further(), expected=expected)


def _accuracies(found: list[float]) -> str:
    return ", then ".join(f"{one:.3f}" for one in found)


def _evaluate(writer: StatusWriter) -> list[float]:
    """Held-out accuracy of the first and the last version, as the run stored it or made now."""
    context, note = writer.context, functools.partial(writer.note_progress, "evaluating")
    left_out = {one.version for one in skipped(context.store)}  # no reason to fail a run at its end
    ends = [version for version in (0, context.config.versions) if version not in left_out]
    return [evaluate_version(context, version, note).accuracy for version in ends]


def _prepared(config: RunConfig, run_id: str | None, storage: str | None) -> RunContext:
    """The run in storage: new, or the one of that name."""
    if storage:
        return await_run(storage)
    run_id = run_id or run_id_of(config.name, flow_run.id)
    context = replace(context_of(store_uri(config), run_id), patience=config.store.patience_seconds)
    if not context.store.exists(entry_path(0)):
        prepare(config, run_id, get_run_logger().info)
    for one in select_shown(differences(tree_of(context.config), tree_of(config)), context.log.state.version + 1):
        cure = f"to change it: rollflow resume {context.uri} --set {one.key}=VALUE"
        words = "%s = %s, as the run's log has it, and not %s; %s"
        get_run_logger().warning(words, one.key, one.before, one.after, cure)
    context.prompts()  # what it asks must be what it asked
    return context


def _claimed(context: RunContext, address: str) -> Writer:
    """The run is this supervisor's now, on a page that says so."""
    supervisor = claim(context, "supervisor", address, f"flow run {flow_run.id}")
    with contextlib.suppress(Unreachable):  # a server that is away is no reason not to train
        tag(tags(context.config, context.run_id, "supervisor"))
    _begin_anew(context)
    _reopen(context)
    _sweep(context)
    return supervisor


def _begin_anew(context: RunContext) -> None:
    """Where a person or a schedule starts the run, no restart of before counts against its budgets.

    Nor does what was asked of the run before: it is to go on. What is asked of it since then holds.
    """
    with contextlib.suppress(RollflowError):  # a server or a store that does not answer is no reason not to train
        if not follows_another(own := UUID(str(flow_run.id))):
            begin_anew(context.store)
            take_back(context.store, asked_for(own))


def _reopen(context: RunContext) -> None:
    """Delete the summary of a run that goes on after its end: its presence tells others that the run has ended."""
    if context.store.exists(SUMMARY) and not trained(context):
        context.store.delete(SUMMARY)


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


def mlflow_page(tracker: Tracker, config: RunConfig, otherwise: str) -> str:
    """The run's page in the MLflow that the recipe names, or in the stack's."""
    if config.tracking.uri:
        return tracker.page
    stack = os.environ.get("ROLLFLOW_MLFLOW_PAGE")
    return tracker.page_on(stack) if stack else otherwise


@contextlib.contextmanager
def _end_recorded(context: RunContext, supervisor: Writer) -> Iterator[None]:
    """Record the end of a run that fails before it has a status writer, or whose writer could not record it."""
    try:
        yield
    except Exception as error:
        if supervisor.valid():
            record_end(context, *_ending(error))
        raise


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
    phase, writer.failure = _ending(error)
    with contextlib.suppress(RollflowError):  # the store may be what failed; the error itself must come through
        writer.refresh(phase)
    write_anchor(supervisor.log.state, writer.tracker)
    writer.tracker.finish("FAILED" if phase == "failed" else "KILLED")


def _ending(error: BaseException) -> tuple[Phase, str]:
    """How a run that did not come to its end has ended, and why."""
    if isinstance(error, Pause) or (isinstance(error, Ended) and error.pause):
        return "paused", "its flow run is paused; it goes on when that is resumed"
    if isinstance(error, Ended):
        return "stopped", str(error)
    if isinstance(error, TerminationSignal):  # its flow run is cancelled, or its runner ends
        return "stopped", "its flow run was told to end"
    return "failed", f"{type(error).__name__}: {error}"


def _left(context: RunContext, person: Ended) -> State:
    """The state of the flow run of a run that a person ended."""
    if person.pause:
        raise Pause(state=suspend())
    return cancel(f"{person}; go on with: rollflow resume {context.uri}")


def _finish(
    stages: Stages, writer: StatusWriter, supervisor: Writer, report: AuditReport, page: Page
) -> dict[str, Any]:
    context, tracker = writer.context, writer.tracker
    with contextlib.suppress(StoreFailed, Unreachable):  # what is left of it is garbage, or for who resumes the run
        context.policies.prune(supervisor)  # what waited for an evaluation
    idle = {role: status.idle for role, status in stages.statuses().items()}
    mlflow = mlflow_page(tracker, context.config, "rollflow serve")
    pages = {"prefect": os.environ.get("ROLLFLOW_PREFECT_PAGE", ""), "mlflow": mlflow}
    summary = summarize(context, report, idle, stages.rollout, pages)
    write_anchor(supervisor.log.state, tracker, page)
    plot = home() / "plots" / context.key / "reward.png"
    tracker.log_reward_plot(writer.curves, plot)
    with contextlib.suppress(RollflowError):  # a batch that is damaged now is no reason to fail the run
        tracker.log_ending(ending(context, summary))
    tracker.finish("FINISHED")
    if plot.exists():
        context.store.put("reward.png", plot.read_bytes())
        page.plot(plot)
    page.progress(list(rows(context, list(blocks(0, context.config.versions)))))  # with the last evaluations
    page.close()
    writer.refresh("done")
    return summary
