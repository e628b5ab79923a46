"""Finds or creates the MLflow run of a training run, and writes to it. All training runs of one recipe are in one
MLflow experiment. The runs of a study (`tracking.study`, a set of compared runs) have a common parent run. Each
function may raise the errors of MLflow's client. A description or result may be logged twice, which does no harm.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rollflow.flows.tracking.mlflow_payload import ConfigChanges, KeptVersion, PromptSourceFacts, RunFacts, RunOutcome
from rollflow.storage.audit.anchors import Anchor
from rollflow.storage.errors import Unreachable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

# Without this variable, MLflow's client reports each call to MLflow's developers.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

RUN_TAG, KEY_TAG, STUDY_TAG = "rollflow.run_id", "rollflow.run_key", "rollflow.study"
# Prefix of the tags that have the sha256 of log entries. The number of the log entry follows the prefix.
ANCHOR_TAG = "rollflow.anchor."
# Tags that are set after the run's description or its result was logged.
BEGUN_TAG, ENDED_TAG = "rollflow.begun", "rollflow.ended"
PARENT_TAG = "mlflow.parentRunId"
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"  # MLflow's UI before 3.17 requires this tag.
VIEW_TAG, VIEW_NAME = "mlflow.sharedViewState.rollflow", "accuracy, reward, tokens a second"
COLUMNS = "eval/accuracy", "rollout/reward", "system/tokens_per_second"
VERSION, EVALUATED, RECOVERIES = "version", "evaluation", "recovery"
PREFIXES = {VERSION: ("rollout/", "train/", "system/"), EVALUATED: ("eval/",), RECOVERIES: ("recovery/",)}
# `TABLES_TAG` is a tag that lists the JSON files which MLflow's UI shows as tables.
SAMPLES, TABLES_TAG = "samples.json", "mlflow.loggedArtifacts"
# `CHANGED` is the prefix of the tags that have the new values of changed config keys.
CHANGES, CHANGES_TAG, CHANGED = "config_changes.json", "rollflow.config_changes", "config."
PARAMETERS_A_CALL = 100  # Largest number of parameters that MLflow accepts in one call.


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The metrics of one policy version, one evaluation or one recovery from a crash. `marker` says whether the point
    belongs to a policy version, an evaluation or a recovery.

    The step number of a logged metric is the number of its policy version (or recovery).
    """

    marker: str
    version: int
    metrics: Mapping[str, float]
    when: float


@dataclass(frozen=True, slots=True)
class TrackingPlace:
    """The MLflow database or server, and the MLflow experiment, to which a run is logged. `artifacts` is the folder for
    MLflow artifacts if MLflow's database is a local file, and None otherwise.
    """

    uri: str
    experiment: str
    artifacts: Path | None = None

    @classmethod
    def default(cls, home: Path, experiment: str) -> TrackingPlace:
        """Return the default place for tracking: an SQLite database of MLflow and a folder for artifacts, both in the
        run home.
        """
        folder = home.absolute() / "mlflow"
        return cls(f"sqlite:///{folder}/mlflow.db", experiment, folder / "artifacts")


@dataclass
class MlflowRun:
    """An open MLflow run: its client, its ids, and the last logged number for each kind of metrics (`marker`)."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    last: dict[str, int] = field(default_factory=dict)
    # Newest policy version when the run's result was logged, "" if it was not logged, or "yes" from older releases.
    ended: str = ""
    changes: int = 0  # Number of changes of the run's configuration that MLflow already has.
    # Numbers of the entries of the run's log whose hashes MLflow already has.
    anchors: set[int] = field(default_factory=set)

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Log the metrics of all points in one call to MLflow, so that either all or none of them are stored."""
        from mlflow.entities import Metric

        metrics = []
        for point in points:
            stamp = (int(point.when * 1000), point.version)
            metrics += [Metric(name, float(value), *stamp) for name, value in point.metrics.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def log_beginning(self, beginning: RunFacts) -> None:
        """Log the description of a run: its text files as artifacts, and its prompts as MLflow datasets."""
        for name, text in beginning.texts.items():
            self.client.log_text(self.run_id, text, name)
        if beginning.prompts:
            self.client.log_inputs(self.run_id, [_build_dataset(one) for one in beginning.prompts])
        self.client.set_tag(self.run_id, BEGUN_TAG, "yes")

    def log_anchor(self, anchor: Anchor) -> None:
        """Log the hash of an entry of the run's log, unless MLflow already has this hash."""
        if anchor.n not in self.anchors:
            self.client.set_tag(self.run_id, f"{ANCHOR_TAG}{anchor.n:010d}", anchor.sha256)
            self.anchors.add(anchor.n)

    def log_ending(self, ending: RunOutcome) -> None:
        """Log the run's result (numbers, files, sample responses and stored policy versions), unless MLflow already has
        it.

        Final numbers are logged as tags, because MLflow would plot a metric with one value as a curve of one point.
        """
        from mlflow.entities import RunTag

        if self.ended == str(ending.version) or (self.ended == "yes" and not self.changes):
            return
        figures = [RunTag(f"final.{name}", f"{value:.6g}") for name, value in ending.figures.items()]
        self.client.log_batch(self.run_id, tags=figures)
        for name, text in ending.texts.items():
            self.client.log_text(self.run_id, text, name)
        if ending.samples:
            self.client.log_dict(self.run_id, _format_table(ending.samples), SAMPLES)
            self._show_tables(*([CHANGES] if self.changes else []), SAMPLES)
        self._log_models(ending.models)
        self.client.set_tag(self.run_id, ENDED_TAG, str(ending.version))
        self.ended = str(ending.version)

    def log_changes(self, changes: ConfigChanges) -> None:
        """Log the changes of the run's configuration as a table, files and tags, because parameters in MLflow cannot
        change.
        """
        if changes.count == self.changes:
            return
        for name, text in changes.texts.items():
            self.client.log_text(self.run_id, text, name)
        self.client.log_dict(self.run_id, _format_table(changes.table), CHANGES)
        self._show_tables(CHANGES, *([SAMPLES] if self.ended else []))
        for key, value in changes.keys.items():
            self.client.set_tag(self.run_id, f"{CHANGED}{key}", value)
        self.client.set_tag(self.run_id, CHANGES_TAG, str(changes.count))
        self.changes = changes.count

    def _show_tables(self, *paths: str) -> None:
        tables = [{"path": path, "type": "table"} for path in paths]
        self.client.set_tag(self.run_id, TABLES_TAG, json.dumps(tables))

    def _log_models(self, versions: Sequence[KeptVersion]) -> None:
        from mlflow.entities import LoggedModelOutput

        known = {model.name for model in self._models()}
        outputs = []
        for version in versions:
            name = f"version-{version.number}"
            if name in known:
                continue
            accuracy = {} if version.accuracy is None else {"accuracy": f"{version.accuracy:.6g}"}
            model = self.client.create_logged_model(self.experiment_id, name, self.run_id, dict(version.tags), accuracy)
            self.client.finalize_logged_model(model.model_id, "READY")
            outputs.append(LoggedModelOutput(model.model_id, version.number))
        if outputs:
            self.client.log_outputs(self.run_id, outputs)

    def _models(self) -> Sequence[LoggedModel]:
        found: Sequence[LoggedModel] = self.client.search_logged_models(
            [self.experiment_id], f"source_run_id = '{self.run_id}'"
        )
        return found


def open_run(
    place: TrackingPlace, tags: Mapping[str, str], parameters: Mapping[str, str], beginning: RunFacts
) -> MlflowRun:
    """Find or create the MLflow run of a training run, and log the parts of its description that MLflow does not have
    yet.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Param

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if place.artifacts is not None:
        place.artifacts.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=place.uri)
    experiment_id = _open_experiment(client, place)
    found = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{tags[KEY_TAG]}'", max_results=1)
    if found:
        run = found[0]
        client.update_run(run.info.run_id, status="RUNNING")
    else:
        below = {PARENT_TAG: _open_study(client, experiment_id, beginning.study)} if beginning.study else {}
        run = client.create_run(experiment_id, run_name=tags[RUN_TAG], tags={**tags, **below})
    fresh = [Param(key, value) for key, value in parameters.items() if key not in run.data.params]
    for start in range(0, len(fresh), PARAMETERS_A_CALL):
        client.log_batch(run.info.run_id, params=fresh[start : start + PARAMETERS_A_CALL])
    ended, changes = run.data.tags.get(ENDED_TAG, ""), int(run.data.tags.get(CHANGES_TAG, 0))
    anchors = {int(tag.removeprefix(ANCHOR_TAG)) for tag in run.data.tags if tag.startswith(ANCHOR_TAG)}
    opened = MlflowRun(client, run.info.run_id, experiment_id, _newest_steps(run), ended, changes, anchors)
    if BEGUN_TAG not in run.data.tags:
        opened.log_beginning(beginning)
    opened.log_changes(beginning.changes)
    return opened


def read_tags(place: TrackingPlace, key: str) -> Mapping[str, str]:
    """Return the tags of the MLflow run with this key, or an empty mapping if there is no such run.

    Raises:
        Unreachable: MLflow cannot be read.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = MlflowClient(tracking_uri=place.uri)
        experiment = client.get_experiment_by_name(place.experiment)
        where = f"tags.`{KEY_TAG}` = '{key}'"
        found = client.search_runs([experiment.experiment_id], where, max_results=1) if experiment else []
    except (MlflowException, RequestException, SQLAlchemyError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unreachable(f"the MLflow experiment of this run cannot be read ({first})") from error
    tags: Mapping[str, str] = found[0].data.tags if found else {}
    return tags


def _newest_steps(run: Run) -> dict[str, int]:
    """Return the newest logged step number of each kind of metrics (`marker`). The step number of one metric is enough,
    because one call to MLflow logs all metrics of a step or none.
    """
    metrics = run.data.to_proto().metrics
    steps = {name: [one.step for one in metrics if one.key.startswith(prefix)] for name, prefix in PREFIXES.items()}
    return {name: max(found) for name, found in steps.items() if found}


def _open_experiment(client: MlflowClient, place: TrackingPlace) -> str:
    experiment = client.get_experiment_by_name(place.experiment)
    tags = {KIND_TAG: KIND, VIEW_TAG: _build_view()}
    if experiment is None:
        location = place.artifacts.as_uri() if place.artifacts is not None else None
        return str(client.create_experiment(place.experiment, artifact_location=location, tags=tags))
    # Tags that exist are not overwritten, because a user may have changed them.
    for tag in tags.keys() - experiment.tags.keys():
        client.set_experiment_tag(experiment.experiment_id, tag, tags[tag])
    return str(experiment.experiment_id)


def _build_view() -> str:
    """Return a saved view of an MLflow experiment, in MLflow's format. The view has columns for the metrics in
    `COLUMNS`.
    """
    state = {"selectedColumns": [f"metrics.`{name}`" for name in COLUMNS]}
    return json.dumps({"name": VIEW_NAME, "createdAt": 0, "state": json.dumps(state)})


def _open_study(client: MlflowClient, experiment_id: str, name: str) -> str:
    """Return the MLflow run that represents a study (set of compared runs), and create it if it does not exist. If two
    processes have each created an MLflow run for the study, return the older one.
    """

    def found() -> list[str]:
        where, order = f"tags.`{STUDY_TAG}` = '{name}'", ["attributes.start_time ASC"]
        return [run.info.run_id for run in client.search_runs([experiment_id], where, order_by=order)]

    if not found():
        made = client.create_run(experiment_id, run_name=name, tags={STUDY_TAG: name})
        # End the MLflow run of the study itself, because nothing more is logged to it.
        client.set_terminated(made.info.run_id, "FINISHED")
    return found()[0]


def _build_dataset(prompts: PromptSourceFacts):  # type: ignore[no-untyped-def]
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(prompts.name, prompts.digest, prompts.kind, prompts.source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def _format_table(columns: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Return a table in the JSON format that MLflow shows as a table."""
    return {"columns": list(columns), "data": [list(row) for row in zip(*columns.values(), strict=True)]}
