"""Trains recipes every night, one after another, and compares each trained policy with the recipe's best policy so far.

    for each recipe:  train (from last night's version) --> evaluate --> export --> better beyond noise? --> alias
                                                                                          |
    a report: artifact, and notification   <-- failed nights, too <-- prune old nights <--+

Two nights never overlap: Prefect cancels a new flow run of the deployment while another one runs. If a recipe fails or
takes too long, the report says so; the next recipe and the next night are trained as usual.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Failed
from pydantic import Field, ValidationError, field_validator

from rollflow.flows.config import describe_errors, load_recipe, read_toml
from rollflow.flows.export import export
from rollflow.flows.keepalive.supervisor_restart import list_successors
from rollflow.flows.locations import context_of, list_runs, run_home, store_uri
from rollflow.flows.registration.prefect_api import (
    SERVED,
    call_until_answered,
    flow_state,
    list_supervisors,
    open_client,
    reason_of,
    start,
    unfinished_runs,
)
from rollflow.flows.services.times import utc_minute
from rollflow.flows.tracking.mlflow_run import TrackingPlace
from rollflow.flows.tracking.registry import EvaluationScore, RegisteredVersion, Registry, z_score
from rollflow.flows.views.summary import SUMMARY
from rollflow.storage.errors import ConfigError, RollflowError, Unreachable
from rollflow.storage.log.entries import entry_path
from rollflow.tasks.rollout.evaluation import read_evaluation
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.names import RecipeName
from rollflow.tasks.runtime.sections import Section, refuse

POLL_SECONDS = 2.0
CANCEL_SECONDS = 120.0
MARK = "-night-"  # Text between the recipe's name and the time in the run id of a nightly run.


class Nightly(Section):
    """The content of a nightly file, which lists the recipes to train every night."""

    name: RecipeName = Field("nightly", description="name of the Prefect deployment that trains the recipes")
    recipes: tuple[str, ...] = Field(
        min_length=1,
        description="paths of the recipe files, which are trained in this order; the files are read again every night",
    )
    cron: str = Field("0 1 * * *", description="cron expression for the start of each night")
    timezone: str = Field("UTC", description="time zone of `cron`, e.g. Europe/Berlin")
    hours: float = Field(
        6.0, gt=0, le=1000, description="longest time for one recipe, in hours; a run that takes longer is stopped"
    )
    from_last: bool = Field(
        False,
        description="true: a night starts from the last policy version of the previous night; false: a night "
        "starts from the recipe's policy",
    )
    z: float = Field(
        1.645,
        ge=0,
        le=100,
        description="number of standard errors by which the accuracy of a version must exceed the best version's "
        "accuracy",
    )
    answers: int = Field(
        100, ge=1, description="smallest number of held-out answers that a comparison of two versions needs"
    )
    alias: str = Field(
        "best", pattern=r"^[A-Za-z][\w-]*$", description="alias of the best version in MLflow's model registry"
    )
    keep: int = Field(
        7,
        gt=0,
        description="number of newest nights whose runs and versions are kept; the night that made the best version "
        "is kept, too",
    )
    notify: str | None = Field(
        None, description="name of a Prefect notification block that reports each night, e.g. slack-webhook/nightly"
    )

    @field_validator("timezone")
    @classmethod
    def _check_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (KeyError, OSError, ValueError):
            refuse("timezone", name, "there is no such time zone; write a time zone such as Europe/Berlin")
        return name


def read_nightly(file: Path) -> Nightly:
    """Read a nightly file, which lists the recipes to train every night. Paths of recipes are relative to the file's
    folder.

    Raises:
        ConfigError: the nightly file is invalid; the message names each key that must change.
    """
    tree = read_toml(file, "nightly file")
    try:
        plan = Nightly.model_validate(tree)
        CronSchedule(cron=plan.cron, timezone=plan.timezone)
    except ValidationError as error:
        raise ConfigError(f"nightly file {str(file)!r}: {describe_errors(error, Nightly, tree)}") from None
    recipes = tuple(str((file.absolute().parent / one).resolve()) for one in plan.recipes)
    for one in recipes:
        load_recipe(Path(one), [])
    return plan.model_copy(update={"recipes": recipes})


@dataclass(frozen=True, slots=True)
class Report:
    """The result of training one recipe in one night, as text for the report."""

    recipe: str
    run_id: str
    result: str
    ok: bool


Train = Callable[[RunConfig, str, float], RunContext]


@flow(name="nightly", log_prints=False)
def nightly(plan: Nightly) -> Any:
    """Train the recipes of a nightly file one after another; mark each policy that is its recipe's best so far."""
    when = flow_run.scheduled_start_time or datetime.now(UTC)
    reports = run_night(plan, when, train_here)
    for report in reports:
        get_run_logger().info("%s: %s", report.recipe, report.result)
    text = render_report(plan, when, reports)
    create_markdown_artifact(text, key=f"nightly-{plan.name.lower().replace('.', '-').replace('_', '-')}")
    if plan.notify:
        # With `return_state`, a failed notification does not make the night's flow run fail.
        notify(plan.notify, text, return_state=True)
    failed = [report for report in reports if not report.ok]
    return Failed(message="; ".join(f"{one.recipe}: {one.result}" for one in failed)) if failed else None


@nightly.on_crashed
def notify_crash(flow: Any, flow_run: Any, state: Any) -> None:  # Prefect passes these arguments by name
    """Notify the user that the flow run of a night crashed. The Prefect runner calls this function."""
    plan = Nightly.model_validate(flow_run.parameters["plan"])
    if plan.notify:
        _send(plan.notify, f"# {plan.name}: a night crashed\n\n{flow_run.name}: {state.message}\n")


def run_night(plan: Nightly, when: datetime, train: Train) -> list[Report]:
    """Train every recipe of a nightly file, even if the training of an earlier recipe has failed."""
    stamp = when.astimezone(UTC).strftime("%Y%m%d-%H%M")
    return [_train_recipe(plan, Path(file), stamp, train) for file in plan.recipes]


def _train_recipe(plan: Nightly, file: Path, stamp: str, train: Train) -> Report:
    run_id = name = file.stem
    try:
        config = load_recipe(file, [])
        name, run_id = config.name, f"{config.name}{MARK}{stamp}"
        versions = run_home() / "nightly" / name
        if plan.from_last and (last := _find_newest(versions, name)):
            config = _start_from(config, last)
        context = train(config, run_id, plan.hours * 3600)
        registry = Registry(_registry_uri(config), name, plan.alias)
        best, score = registry.best(), read_score(context)
        _export(context, versions / run_id)
        made = registry.add(str(versions / run_id), run_id, score)
        better, result = _judge(best, score, plan)
        if better:
            registry.promote(made)
        _prune(context, versions, name, plan.keep, registry)
        return Report(name, run_id, result, ok=True)
    except (RollflowError, OSError) as error:
        return Report(name, run_id, f"failed: {error}", ok=False)


def _judge(best: RegisteredVersion | None, score: EvaluationScore, plan: Nightly) -> tuple[bool, str]:
    """Return whether a newly trained policy is better than the best policy of its recipe so far. Also return the reason
    as text.

    A policy is never promoted if it or the best policy has fewer than `plan.answers` evaluated answers, because the
    z-test needs many answers.
    """
    said = f"{score.accuracy:.1%} of {score.responses} held-out answers"
    # If a night is repeated, its policy may already be the best one; then both scores are equal.
    if best is None or best.score == score:
        return (
            best is None,
            f"{said}; promoted as the first version" if best is None else f"{said}; this is the best version",
        )
    known = (
        f"the best version so far has {best.score.accuracy:.1%} of {best.score.responses} held-out "
        f"answers ({best.run_id})"
    )
    if min(score.responses, best.score.responses) < plan.answers:
        cure = f"fewer than answers = {plan.answers} held-out answers cannot be compared; raise evaluation.prompts"
        return False, f"{said}; not promoted: {known}, and {cure}"
    z = z_score(score, best.score)
    return z > plan.z, f"{said}; {'promoted' if z > plan.z else 'not promoted'}: {known}, z = {z:.2f}, bound {plan.z:g}"


def _find_newest(versions: Path, name: str) -> Path | None:
    """Return the folder of the newest exported policy of this recipe. Folder names sort by time."""
    return max((one for one in versions.glob("*") if _is_night(one.name, name)), default=None)


def _start_from(config: RunConfig, folder: Path) -> RunConfig:
    policy = config.policy.model_copy(update={"path": str(folder), "from_run": None, "cold_start": None})
    return config.model_copy(update={"policy": policy})


def read_score(context: RunContext) -> EvaluationScore:
    """Return the held-out evaluation of the last policy version of a run.

    Raises:
        Unreachable: the last policy version has no evaluation.
    """
    found = read_evaluation(context.store, context.config.versions)
    if found is None or not found.responses:
        raise Unreachable(f"run {context.run_id} has no evaluation of its last version; see the run's page in Prefect")
    return EvaluationScore(found.accuracy, found.responses)


def _export(context: RunContext, folder: Path) -> None:
    if not folder.exists():  # If a night is repeated, the exported folder exists already.
        export(context, context.policies.find(context.config.versions), folder)


def _registry_uri(config: RunConfig) -> str:
    return config.tracking.uri or TrackingPlace.default(run_home(), config.tracking.experiment or config.name).uri


def _prune(context: RunContext, versions: Path, name: str, keep: int, registry: Registry) -> None:
    """Delete the old nightly runs of this recipe: their storage, their exported folders and their versions in MLflow's
    model registry.

    The newest `keep` nightly runs are kept, and so are runs whose registered model version has an alias such as "best".
    """
    store, aliased = context.uri.rpartition("/runs/")[0], registry.list_aliases()
    nights = sorted(one.run_id for one in list_runs(store) if _is_night(one.run_id, name))
    for run_id in nights[:-keep]:
        if run_id not in aliased:
            registry.forget(run_id)
            shutil.rmtree(versions / run_id, ignore_errors=True)
            old = context_of(store, run_id).store
            # The log's first entry is deleted last, because `list_runs` finds a run by this entry.
            for path in sorted(old.list(), key=entry_path(0).__eq__):
                old.delete(path)


def render_report(plan: Nightly, when: datetime, reports: list[Report]) -> str:
    """Return the report of one night as Markdown."""
    rows = "\n".join(f"| {one.recipe} | `{one.run_id}` | {one.result.replace('|', '/')} |" for one in reports)
    return f"# {plan.name}, {utc_minute(when)}\n\n| recipe | run | result |\n|---|---|---|\n{rows}\n"


@task(name="notify")
def notify(block: str, text: str) -> None:
    """Send the report of a night through the Prefect notification block that the user has configured."""
    _send(block, text)


def _send(block: str, text: str) -> None:
    from prefect.blocks.core import Block

    found: Any = Block.load(block)
    found.notify(text, subject=text.splitlines()[0].lstrip("# "))


def train_here(config: RunConfig, run_id: str, seconds: float) -> RunContext:
    """Train a run as a flow run of this Prefect runner, and wait until it ends. If the flow run of the night is
    cancelled, the training run is cancelled, too.

    Raises:
        Unreachable: the training run failed, or did not end within `seconds`.
    """
    limit = time.monotonic() + seconds
    _stop_others(config.name)
    parameters = {"config": config.model_dump(mode="json"), "run_id": run_id}
    key = f"{flow_run.id}:{flow_run.run_count}:{run_id}"  # `run_count` gives a retried flow run a new idempotency key.

    def submit() -> UUID:
        with open_client() as client:
            return start(client, "post-training", SERVED, parameters, name=run_id, key=key)

    made = call_until_answered(submit)
    context = context_of(store_uri(config), run_id)
    try:
        while not (ended := _read_outcome(made, context)):
            if time.monotonic() > limit:
                _stop_others(config.name)
                raise Unreachable(
                    f"run {run_id} took longer than {seconds / 3600:g} hours, the limit in the file of nightly runs, "
                    "and was stopped"
                )
            time.sleep(POLL_SECONDS)
    except TerminationSignal:
        with contextlib.suppress(Unreachable):
            _cancel_nights(config.name)
        raise
    if ended != "done":
        raise Unreachable(f"run {run_id} failed: {ended}")
    return context


def _read_outcome(made: UUID, context: RunContext) -> str:
    """Return "" while the training run continues, "done" after its end, or the reason of its failure.

    If the run's supervising flow run has crashed, the state of its successor (the flow run that continues the run) is
    used. The training run has ended once its storage has a summary.
    """
    try:
        state = call_until_answered(lambda: _state_of(made))
        if replace(context, patience=POLL_SECONDS).store.exists(SUMMARY):
            return "done"
    except Unreachable:
        return ""
    if state is None or not state.is_final() or state.is_crashed():
        return ""
    return reason_of(state.message) if state.message else str(state.name)


def _state_of(made: UUID) -> Any:
    """Return the state of a Prefect flow run. If the flow run crashed, return the state of its newest successor, a flow
    run that continues the same training run.
    """
    state = flow_state(made)
    if state is None or not state.is_crashed():
        return state
    with open_client() as client:
        return next((run.state for run in reversed(list_successors(list_supervisors(client), made))), state)


def _stop_others(name: str) -> None:
    """Stop all unfinished nightly runs of this recipe, and wait until they have ended."""
    limit = time.monotonic() + CANCEL_SECONDS
    while time.monotonic() < limit and _cancel_nights(name):
        time.sleep(POLL_SECONDS)


def _cancel_nights(name: str) -> bool:
    """Cancel all unfinished nightly runs of this recipe; return whether there was one."""
    from prefect.states import Cancelling

    with open_client() as client:
        nights = [run for run in unfinished_runs(client, SERVED) if _is_night(run.parameters.get("run_id"), name)]
        for run in nights:
            if run.state_type != "CANCELLING":
                client.set_flow_run_state(run.id, Cancelling())
    return bool(nights)


def _is_night(run_id: object, name: str) -> bool:
    """Return whether a run id is that of a nightly run of the recipe `name`."""
    return isinstance(run_id, str) and re.fullmatch(rf"{re.escape(name)}{MARK}\d{{8}}-\d{{4}}", run_id) is not None
